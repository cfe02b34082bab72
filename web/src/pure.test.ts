import { describe as suite, expect, test } from "vitest";
import { ApiError } from "./api/client";
import { explain } from "./api/problems";
import type { Batch } from "./api/batches";
import { requestsAbout, sampleRequests } from "./batches/questions";
import { asCsv, resultsOf } from "./batches/results";
import { inWords as progressInWords, isUnfinished, secondsLeft } from "./batches/progress";
import { describe, outline, placeOf, SHAPES, SIDE } from "./chat/drawing";
import { formulaOf, withFormulas } from "./chat/formulas";
import { columnsOf, parseJson } from "./chat/json";
import { marksIn, placeIn, unitOf, viewOf } from "./chat/marks";
import { bytes, describeCost, duration, megabytes, percent, rate, seconds } from "./format";
import { inWords } from "./live/block-map";
import { missesInWords, sampleOf, SPAN, withSample, withSamples, type Engine, type Figures, type Sample } from "./live/figures";
import { hrefOf, parseRoute } from "./route";
import { conversationsIn } from "./state/exchange";
import { matches, shelves } from "./state/shelf";
import { shrunkSize } from "./state/shrink";
import { kindOf, seen, type Conversation, type Ending, type Turn } from "./state/types";

suite("numbers", () => {
  test("are as short as they are read", () => {
    expect([0.0042, 0.5, 3.14159, 42].map(seconds)).toEqual(["4.2 ms", "0.50 s", "3.14 s", "42 s"]);
    expect([0, 0.25, 12.3, 4321].map(rate)).toEqual(["0", "0.3", "12", "4,321"]);
    expect([bytes(2048), bytes(3 * 1024 ** 2), percent(1, 3), percent(0, 0), seconds(null)]).toEqual(["2 KiB", "3 MiB", "33%", "–", "–"]);
    expect([200, 2864, 99_999, 100_000, 1.5e6].map(megabytes)).toEqual(["1 kB", "3 kB", "100 kB", "0.1 MB", "1.5 MB"]);
  });

  test("of time that something takes are whole seconds, minutes or hours", () => {
    expect([0.2, 89, 100, 3600, 7000, 7170].map(duration)).toEqual(["1 s", "89 s", "2 min", "60 min", "1 h 57 min", "2 h 0 min"]);
  });

  test("of an answer leave out a speed that cannot be measured", () => {
    const cost = { promptTokens: 1200, cachedTokens: 1000, answerTokens: 11, firstToken: 0.5, total: 2.5 };
    expect(describeCost(cost)).toBe("1,200 tokens read (1,000 cached) · 11 written · first after 0.50 s · 5.0 tokens/s");
    expect(describeCost({ ...cost, total: 0.51 })).not.toContain("tokens/s");
  });
});

suite("batches", () => {
  const batch: Batch = {
    id: "batch_1",
    endpoint: "/v1/chat/completions",
    model: "pixie",
    status: "in_progress",
    errors: null,
    input_file_id: "file-1",
    output_file_id: null,
    error_file_id: null,
    created_at: 900,
    in_progress_at: 1000,
    request_counts: { total: 1000, completed: 249, failed: 1 },
    metadata: {},
  };

  test("say how far they are, and how long they will take at that pace", () => {
    expect(progressInWords(batch, 1100)).toBe("250 of 1,000 requests, 1 failed, about 5 min left");
    expect(secondsLeft(batch, 990)).toBe(0); // a clock that is behind the server's
    expect(progressInWords({ ...batch, request_counts: { total: 4, completed: 0, failed: 0 } }, 1100)).toBe("0 of 4 requests");
    expect(progressInWords({ ...batch, status: "completed" }, 1100)).toBe("250 of 1,000 requests, 1 failed");
    expect(progressInWords({ ...batch, status: "validating", request_counts: { total: 0, completed: 0, failed: 0 } }, 1100)).toBe("");
  });

  test("are unfinished as long as their results are not written", () => {
    const unfinished = (["validating", "in_progress", "finalizing", "cancelling"] as const).map((status) => isUnfinished({ ...batch, status }));
    const finished = (["completed", "failed", "expired", "cancelled"] as const).map((status) => isUnfinished({ ...batch, status }));
    expect([...unfinished, ...finished]).toEqual([true, true, true, true, false, false, false, false]);
  });
});

suite("errors", () => {
  test("are told by what helps", () => {
    expect(explain(new ApiError(401, "invalid_api_key", "No")).remedy).toBe("key");
    expect(explain(new ApiError(429, "overloaded", "Busy", 7)).detail).toContain("7 s");
    expect(explain(new ApiError(400, "context_length_exceeded", "Long")).title).toContain("too long");
    expect(explain(new ApiError(0, "broken_off", "")).title).toBe("The answer was interrupted");
    expect(explain(new TypeError("x is undefined")).title).toContain("this page");
  });
});

suite("addresses", () => {
  test("lead to what they were made of", () => {
    for (const route of [{ view: "live" }, { view: "chat" }, { view: "chat", id: "a/b c" }] as const) {
      expect(parseRoute(hrefOf(route))).toEqual(route);
    }
    expect(parseRoute("#nonsense")).toEqual({ view: "chat" });
  });
});

suite("files", () => {
  test("are what their type says, or else their name", () => {
    const files = [["a", "image/png"], ["a", "image/tiff"], ["a", "application/pdf"], ["A.PDF", ""], ["a.heic", ""], ["a.mov", ""]] as const;
    expect(files.map(([name, type]) => kindOf(name, type))).toEqual(["image", "document", "document", "document", "image", "video"]);
    expect([kindOf("a.svg", "image/svg+xml"), kindOf("a.txt", "text/plain"), kindOf("a", "")]).toEqual([undefined, undefined, undefined]);
  });
});

suite("JSON", () => {
  test("is shown as a table when it is whole and not too large", () => {
    expect(parseJson(' {"a": [1, null]}')).toEqual({ a: [1, null] });
    const tooLarge = JSON.stringify(Array(3000).fill(1));
    const tooDeep = "[".repeat(9) + "]".repeat(9);
    for (const text of ["{", "12", '"text"', "Some [text]", '{"a": 1} and more', tooLarge, tooDeep]) expect(parseJson(text)).toBeUndefined();
  });

  test("has the columns of all its rows", () => {
    expect(columnsOf([{ a: 1, b: 2 }, { c: null }])).toEqual(["a", "b", "c"]);
    for (const values of [[], [1, { a: 1 }], [{}, {}]]) expect(columnsOf(values)).toBeUndefined();
  });
});

suite("marks", () => {
  test("are found as models write them", () => {
    const box = { label: "cat", at: [10, 20, 30, 40], unit: undefined };
    expect(marksIn('```json\n[{"bbox_2d": [10, 20, 30, 40], "label": "cat"}]\n```')).toEqual([box]);
    expect(marksIn('{"found": {"name": "cat", "bbox": [10, 20, 30, 40]}, "count": 1}')).toEqual([box]);
    expect(marksIn('[{"box_2d": [20, 10, 40, 30], "label": "cat"}]')).toEqual([{ ...box, unit: "thousandths" }]);
    expect(marksIn('{"x_min": 0.1, "y_min": 0.2, "x_max": 0.3, "y_max": 0.4}')[0]?.at).toEqual([0.1, 0.2, 0.3, 0.4]);
    expect(marksIn('[{"point_2d": [5, 6], "label": "eye"}, {"x": 0.5, "y": 0.25}]').map((mark) => mark.at)).toEqual([[5, 6], [0.5, 0.25]]);
    expect(marksIn("<loc0256><loc0512><loc0768><loc1023> cat ; <loc0000><loc0000><loc0512><loc0512> dog")).toMatchObject([
      { label: "cat", at: [0.5, 0.25, 1023 / 1024, 0.75], unit: "shares" },
      { label: "dog", at: [0, 0, 0.5, 0.5] },
    ]);
    expect(marksIn("<ref>cat</ref><box>[[10, 20, 30, 40]]</box>")).toEqual([{ ...box, unit: "thousandths" }]);
    expect(marksIn("<ref>cat</ref><box>(10,20),(30,40)</box>")).toEqual([{ ...box, unit: "thousandths" }]);
    expect(marksIn("<|ref|>cat<|/ref|><|det|>[[10, 20, 30, 40]]<|/det|>")).toEqual([{ ...box, unit: "thousandths" }]);
    expect(marksIn('<points x1="10" y1="20" x2="30.5" y2="40" alt="eyes">eyes</points>').map((mark) => mark.at)).toEqual([[0.1, 0.2], [0.305, 0.4]]);
  });

  test("are none in other answers", () => {
    const texts = ["a red circle", '{"bbox": [1, 2, 3]}', '{"bbox": [9, 9, 3, 3]}', '{"bbox": ["1", 2, 3, 4]}', '{"x": 1}', "[1, 2, 3, 4]", "<loc0001>"];
    for (const text of texts) expect(marksIn(text)).toEqual([]);
  });

  test("stand where their coordinates say", () => {
    const marks = marksIn('[{"bbox": [100, 50, 200, 100]}]');
    expect([unitOf(marks, viewOf(400, 200)), unitOf(marks, viewOf(150, 200)), unitOf([{ label: "", at: [0.5, 1] }], viewOf(9, 9))]).toEqual(["pixels", "thousandths", "shares"]);
    const models = ["Qwen/Qwen3-VL-2B-Instruct", "qwen3-vl:2b", "Qwen/Qwen2-VL-2B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct"];
    expect(models.map((model) => unitOf(marks, viewOf(400, 200), model))).toEqual(["thousandths", "thousandths", "thousandths", "pixels"]);
    expect(placeIn(marks[0]!, "pixels", viewOf(400, 200))).toEqual([0.25, 0.25, 0.5, 0.5]);
    expect(placeIn(marks[0]!, "thousandths", viewOf(400, 200))).toEqual([0.1, 0.05, 0.2, 0.1]);
    expect(placeIn({ label: "", at: [500, 20], unit: "shares" }, "pixels", viewOf(400, 200))).toEqual([1, 1]);
  });

  test("are placed by what the model saw of the image", () => {
    const seen = { width: 800, height: 400, model_width: 200, model_height: 200, box: [200, 0, 600, 400] as [number, number, number, number] };
    const view = viewOf(800, 400, seen);
    const box = { label: "", at: [50, 100, 200, 200] };
    expect(unitOf([box], view)).toBe("pixels");
    expect(placeIn(box, "pixels", view)).toEqual([0.375, 0.5, 0.75, 1]); // a crop of the middle, at half its size
    expect(placeIn({ label: "", at: [500, 500] }, "thousandths", view)).toEqual([0.5, 0.5]);
    expect(placeIn(box, "pixels", viewOf(800, 400, { ...seen, box: null }))).toEqual([0.25, 0.5, 1, 1]);
    expect(viewOf(800, 400, { ...seen, model_width: null })).toEqual(viewOf(800, 400));
  });
});

suite("turns", () => {
  const pair = (id: string, text: string, ending?: Ending): Turn[] => [
    { id: `${id}?`, role: "user", text: id, attachments: [] },
    { id: `${id}!`, role: "assistant", text, attachments: [], ending },
  ];

  test("that came to nothing are not shown to the model", () => {
    const last: Turn = { id: "last", role: "user", text: "last", attachments: [] };
    const turns = [...pair("a", "yes", "complete"), ...pair("b", "", "failed"), ...pair("c", "half", "stopped"), last];
    expect(seen(turns).map((turn) => turn.id)).toEqual(["a?", "a!", "c?", "c!", "last"]);
  });
});

suite("drawings", () => {
  test("have shapes that fill their square and places with names", () => {
    for (const shape of SHAPES.filter((one) => one !== "circle" && one !== "ring")) {
      const points = outline(shape).flat();
      expect(Math.max(...points)).toBeGreaterThan(0.85);
      expect(points.every((value) => Math.abs(value) <= 1.001)).toBe(true);
    }
    expect([placeOf([0, 0]), placeOf([SIDE / 2, SIDE / 2]), placeOf([SIDE, SIDE / 2])]).toEqual(["top left", "middle", "middle right"]);
    expect(describe("white", [])).toBe("Nothing on white yet.");
  });
});

suite("live figures", () => {
  const nothing = {} as Figures["latencies"];
  const figures = (time: number, engine: Partial<Engine> | null): Figures => ({
    time, status: "serving", model: "m", engine: engine as Engine | null, image_cache: null, blocks: null, latencies: nothing,
  });

  test("become rates by the server's clock", () => {
    const before = figures(10, { steps: 1, prompt_tokens: 100, generation_tokens: 0, num_running: 1, num_waiting: 0 });
    const now = figures(12, { steps: 5, prompt_tokens: 150, generation_tokens: 40, num_running: 2, num_waiting: 1 });
    expect(sampleOf(before, now)).toEqual({ time: 12, running: 2, waiting: 1, prompt: 25, generation: 20 });
  });

  test("say why prompt tokens were not found", () => {
    const misses = (seen: number, evicted: number, unsaved: number) =>
      missesInWords({ prefix_never_seen_tokens: seen, prefix_evicted_tokens: evicted, prefix_unsaved_tokens: unsaved } as Engine);
    expect(misses(1200, 80, 0)).toBe("1,200 never seen · 80 evicted");
    expect(misses(0, 0, 3)).toBe("3 without a checkpoint");
    expect(misses(0, 0, 0)).toBe("none");
  });

  test("have gaps where an engine has begun anew or is not there", () => {
    const before = figures(10, { steps: 9, prompt_tokens: 100, generation_tokens: 50 });
    expect(sampleOf(before, figures(11, { steps: 1, prompt_tokens: 5, generation_tokens: 1 })).prompt).toBeNull();
    expect(sampleOf(before, figures(11, null))).toMatchObject({ running: null, generation: null });
    expect(sampleOf(undefined, before).generation).toBeNull();
  });

  test("are of all workers together and of each by itself", () => {
    const of = (time: number, generation_tokens: number) => figures(time, { steps: time, prompt_tokens: 0, generation_tokens });
    const first = { ...of(10, 30), workers: { a: of(3, 10), b: of(5, 20) } };
    const second = { ...of(12, 70), workers: { b: of(7, 60), c: of(1, 5) } };
    const history = withSamples(withSamples({}, undefined, first), first, second);
    expect(Object.entries(history).map(([name, samples]) => [name, samples.map((sample) => sample.generation)])).toEqual([
      ["", [null, 20]],
      ["b", [null, 20]],
      ["c", [null]],
    ]);
  });

  test("are kept for as long as charts show them", () => {
    let samples: readonly Sample[] = [];
    for (let time = 0; time < 3 * SPAN; time++) samples = withSample(samples, { time, running: 0, waiting: 0, prompt: 0, generation: 0 });
    expect(samples.length).toBe(SPAN);
  });

  test("of blocks are told in words", () => {
    const words = inWords({ num_blocks: 8, blocks_per_cell: 2, held: [2, 1, 0, 0], cached: [0, 1, 1, 0], holders: [3, 1, 0, 0] });
    expect(words).toBe("3 of 8 blocks held (38%) · 2 cached, to be found again · 3 free · up to 3 requests share one. A square is 2 blocks.");
  });
});

suite("formulas", () => {
  /** TeX of the code spans that stand for formulas; those on lines of their own begin with "!". */
  function found(text: string): string[] {
    const spans = [...withFormulas(text).matchAll(/(`+)([\ue000\ue001].*?)\1/g)].map(([, , code]) => formulaOf(code!)!);
    return spans.map(({ tex, display }) => (display ? `!${tex}` : tex));
  }

  test("are found in all four spellings", () => {
    expect(found("so $x_1 + y_2$ and \\(a*b*c\\), then $$\n\\frac{1}{2}\n$$ or \\[ E = mc^2 \\]")).toEqual([
      "x_1 + y_2",
      "a*b*c",
      "!\\frac{1}{2}",
      "!E = mc^2",
    ]);
    expect(found("$x$, ($y$) $z$.")).toEqual(["x", "y", "z"]);
    expect(found("costs \\$3, $\\$5 + x$")).toEqual(["\\$5 + x"]);
  });

  test("are neither prices nor code", () => {
    const texts = [
      "$5 and $6",
      "$5-$6, $20,$30 and US$5 to US$6",
      "it has $ 5 $ left",
      "`$x$` and ``a ` $y$``",
      "```\n$x$\n\\(y\\)\n```\n",
      "~~~sh\necho $A$B\n```\n$x$\n~~~",
      "an open $x",
      "\\$x$",
      "$$a\n\nb$$",
      "$$$$",
    ];
    for (const text of texts) expect(withFormulas(text)).toBe(text);
  });

  test("may follow code and hold back quotes, comments and bars", () => {
    expect(found("```\n$no$\n```\n$yes$")).toEqual(["yes"]);
    expect(found("$a`b$")).toEqual(["a`b"]);
    expect(found("$$a % why\n+ b$$")).toEqual(["!a + b"]);
    expect(found("| $|x|$ | $\\|y\\|$ |")).toEqual(["\\vert x\\vert", "\\Vert y\\Vert"]);
    expect(found("so $|x|$")).toEqual(["|x|"]);
    expect(formulaOf("x")).toBeUndefined();
  });
});

suite("a batch about files", () => {
  const file = { id: "1", name: "a.png", kind: "image", fileId: "file-1" } as const;

  test("asks about each and names each once", () => {
    const lines = requestsAbout([file, { ...file, fileId: "file-2" }], "Why?", "pixie", { maxTokens: 5 }).trim().split("\n");
    const [first, second] = lines.map((line) => JSON.parse(line));
    expect([first.custom_id, second.custom_id]).toEqual(["a.png", "a.png (2)"]);
    expect(first.body).toMatchObject({ model: "pixie", store: false, max_output_tokens: 5 });
    expect(second.body.input[0].content).toEqual([
      { type: "input_image", file_id: "file-2" },
      { type: "input_text", text: "Why?" },
    ]);
  });

  test("is read in the order of its requests", () => {
    const answered = (id: string, body: object) => JSON.stringify({ custom_id: id, response: { status_code: 200, body } });
    const output = [
      answered("b", { choices: [{ message: { content: 'a "b", c' } }] }),
      answered("a.png", { output: [{ type: "reasoning", content: [{ text: "hm" }] }, { type: "message", content: [{ text: "red" }] }] }),
    ];
    const errors = JSON.stringify({ custom_id: "c", response: { status_code: 400, body: { error: { message: "no" } } } });
    const input = `${requestsAbout([file], "Why?", "pixie", {})}{"custom_id": "b", "body": {}}\nwrong`;
    const results = resultsOf({ input, output: output.join("\n"), errors });
    expect(results.map(({ id, answer, error }) => [id, answer, error])).toEqual([
      ["a.png", "red", undefined],
      ["b", 'a "b", c', undefined],
      ["c", undefined, "no"],
    ]);
    expect(results.map((one) => one.file?.fileId)).toEqual(["file-1", undefined, undefined]);
    expect(asCsv(results)).toBe('id,answer,error\r\na.png,red,\r\nb,"a ""b"", c",\r\nc,,no\r\n');
  });

  test("may start from a sample", () => {
    const rows = sampleRequests("pixie").trim().split("\n").map((line) => JSON.parse(line));
    expect(rows.map((row) => row.body.model)).toEqual(["pixie", "pixie"]);
  });
});

test("images shrink to an area", () => {
  expect([shrunkSize(4000, 3000, 480_000), shrunkSize(30, 20, 1000), shrunkSize(1, 90_000, 100)]).toEqual([[800, 600], [30, 20], [1, 3000]]);
});

suite("conversations", () => {
  const now = new Date(2026, 4, 20, 9);
  const one = (title: string, updated: Date, text = ""): Conversation => ({
    id: title,
    title,
    place: "browser",
    updated: updated.getTime(),
    turns: [{ id: "1", role: "user", text, attachments: [] }],
  });

  test("are grouped by date", () => {
    const days = [new Date(2026, 4, 20, 0), new Date(2026, 4, 19, 23), new Date(2026, 4, 19, 0), new Date(2026, 4, 14), new Date(2026, 3, 2)];
    const listed = shelves(days.map((day, index) => one(String(index), day)), now);
    expect(listed.map(({ label, conversations }) => [label, conversations.length])).toEqual([
      ["Today", 1],
      ["Yesterday", 2],
      ["Last 7 days", 1],
      ["April 2026", 1],
    ]);
  });

  test("are found by all words of titles and turns", () => {
    const invoice = one("Invoice", now, "What is the TOTAL?");
    expect(["total invoice", "voice", "total tax"].map((search) => matches(invoice, search))).toEqual([true, true, false]);
  });

  test("of a file are checked", () => {
    const wrap = (conversations: unknown, version = 1) => JSON.stringify({ format: "vlmserve-conversations", version, conversations });
    const image = { name: "a.png", kind: "image", data: "data:image/png;base64,QUJD" };
    const turns = [{ role: "user", text: "Why?", attachments: [image] }, { role: "assistant", text: "So", attachments: [], cost: {} }];
    const [read] = conversationsIn(wrap([{ id: "a1", title: "A", updated: 5, place: "server", turns }]));
    expect([read!.place, read!.turns[0]!.attachments[0]!.blob!.size]).toEqual(["browser", 3]);
    expect([read!.turns[1]!.ending, read!.turns[1]!.cost]).toEqual(["stopped", undefined]);
    for (const [text, problem] of [
      ["[]", /not a file of conversations/],
      ["{", /not a file of conversations/],
      [wrap([], 2), /version 2/],
      [wrap([{ id: "../x", title: "A", updated: 5, turns }]), /Conversation 1 .* no id/],
      [wrap([{ id: "a", title: "A", updated: 5, turns: [{ role: "user", text: "", attachments: [{ ...image, data: "x" }] }] }]), /no data URL/],
    ] as const) {
      expect(() => conversationsIn(text)).toThrow(problem);
    }
  });
});
