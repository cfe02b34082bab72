"""`LLM`: lists in, lists out, in order; bad requests before anything runs; usable after whatever happened."""

from __future__ import annotations

import io
import itertools
import math
import os
import signal
import weakref
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from PIL import Image

from tests.mock_checkpoint import IMAGE_TOKEN_ID, make_mock_checkpoint
from tests.thinking_checkpoint import teach_thoughts
from vlmserve import LLM, RequestOutput, SamplingParams
from vlmserve.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    InvalidImageError,
    InvalidRequestError,
    InvalidRequestsError,
    PromptTooLongError,
    TooManyImagesError,
    VLMServeError,
)
from vlmserve.frontend.deciding import Question
from vlmserve.media import sources
from vlmserve.tasks import Prefill
from vlmserve.types import EngineOutput

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_mock_checkpoint(tmp_path_factory.mktemp("mock"))


@pytest.fixture
def llm(folder) -> LLM:
    return LLM(str(folder), engine="mock")


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("images") / "red.png"
    Image.new("RGB", (40, 30), "red").save(path)
    return path


def ask(text: str, *images: object) -> list[dict[str, object]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def text_of(results) -> list[str]:
    return [result.outputs[0].text for result in results]


def test_results_come_in_the_order_of_the_requests(llm):
    conversations = [ask(f"question {number}") for number in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=1 + number % 5) for number in range(12)]
    together = llm.chat(conversations, params, use_tqdm=False)
    alone = [llm.chat(one, param, use_tqdm=False)[0] for one, param in zip(conversations, params, strict=True)]
    assert text_of(together) == text_of(alone)
    assert [len(result.outputs[0].token_ids) for result in together] == [1 + number % 5 for number in range(12)]
    assert [result.prompt_token_ids for result in together] == [result.prompt_token_ids for result in alone]
    assert len({result.request_id for result in together}) == 12


def test_one_request_also_gives_a_list(llm):
    assert len(llm.chat(ask("hello"), GREEDY, use_tqdm=False)) == 1
    assert len(llm.generate("hello", GREEDY, use_tqdm=False)) == 1


def test_no_requests_give_no_results(llm):
    assert llm.chat([], use_tqdm=False) == []
    assert llm.generate([], use_tqdm=False) == []


def test_every_form_of_an_image_is_equal(llm, image):
    import base64

    data = image.read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    sources = [str(image), image, data, url]
    results = llm.chat([ask("What is this?", source) for source in sources], GREEDY, use_tqdm=False)
    assert len(set(text_of(results))) == 1
    opened = llm.chat(ask("What is this?", Image.open(io.BytesIO(data))), GREEDY, use_tqdm=False)
    assert opened[0].prompt_token_ids == results[0].prompt_token_ids


def test_arrays_are_images_under_any_name(llm, image):
    opened = Image.open(image)
    array = np.asarray(opened)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1) / 255
    parts = [
        {"type": "image", "image": opened},
        {"type": "image", "image": array},
        {"type": "image", "image": tensor},
        {"type": "image_pil", "image_pil": opened},
        {"type": "image_url", "image_url": {"url": opened}},
    ]
    question = {"type": "text", "text": "What is this?"}
    results = llm.chat([[{"role": "user", "content": [part, question]}] for part in parts], GREEDY, use_tqdm=False)
    assert len(set(text_of(results))) == 1
    files = [{"type": "image", "path": str(image)}, {"type": "image", "url": image.as_uri()}]
    results = llm.chat([[{"role": "user", "content": [files[0], question]}]], GREEDY, use_tqdm=False)
    assert results[0].text == llm.chat(ask("What is this?", image), GREEDY, use_tqdm=False)[0].text
    with pytest.raises(InvalidRequestError, match=r"allowed.media.path"):
        llm.chat([[{"role": "user", "content": [files[1], question]}]], GREEDY, use_tqdm=False)
    prompts = [{"prompt": "a <image>", "multi_modal_data": {"image": one}} for one in (opened, array, tensor, [array])]
    assert len({tuple(one.outputs[0].token_ids) for one in llm.generate(prompts, GREEDY, use_tqdm=False)}) == 1


def test_another_image_changes_the_answer(llm, image):
    blue = Image.new("RGB", (40, 30), "blue")
    red, other = llm.chat([ask("What is this?", image), ask("What is this?", blue)], GREEDY, use_tqdm=False)
    assert red.prompt_token_ids == other.prompt_token_ids
    assert red.outputs[0].token_ids != other.outputs[0].token_ids


def test_prompts_carry_images_where_their_placeholders_stand(llm, image):
    prompt = {"prompt": "a <image> b <image>", "multi_modal_data": {"image": [image, Image.open(image)]}}
    single = {"prompt": "a <image>", "multi_modal_data": {"image": image}}
    two, one = llm.generate([prompt, single], GREEDY, use_tqdm=False)
    image_id = llm.preparer.tokenizer.image_token_id
    assert (two.prompt_token_ids.count(image_id), one.prompt_token_ids.count(image_id)) == (8, 4)


def test_token_ids_are_a_prompt_too(llm):
    [result] = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY, use_tqdm=False)
    assert result.prompt_token_ids == [5, 6, 7]


def test_results_count_the_images_that_were_encoded(llm, image):
    blue = Image.new("RGB", (40, 30), "blue")
    results = llm.chat([ask("None?"), ask("One?", image), ask("Two?", image, blue)], GREEDY, use_tqdm=False)
    assert [result.num_images_encoded for result in results] == [0, 1, 2]


def test_a_repeated_image_is_prepared_once(folder, image):
    for memory, misses in (("1MiB", 1), (0, 0)):
        llm = LLM(str(folder), engine="mock", image_cache_memory=memory)
        again = llm.chat([ask(f"question {number}", image) for number in range(8)], GREEDY, use_tqdm=False)
        assert len(set(text_of(again))) == 8
        stats = llm.preparer.media.image_cache.stats()
        assert (stats.misses, stats.hits) == (misses, 7 * misses)


def test_salts_reach_blocks_and_images(llm, image, monkeypatch):
    added = []
    monkeypatch.setattr(llm.engine, "add", lambda request, add=llm.engine.add: added.append(request) or add(request))
    seen = {"prompt": "a <image>", "multi_modal_data": {"image": image}}
    prompts = ["a", {"prompt": "a", "cache_salt": "s"}, {"prompt_token_ids": [5], "cache_salt": "é"}, seen]
    llm.generate([*prompts, seen | {"cache_salt": "s"}], GREEDY, use_tqdm=False)
    llm.chat([ask("What is this?", image)] * 2, GREEDY, use_tqdm=False, cache_salt="s")
    list(llm.stream(ask("What is this?", image), GREEDY, cache_salt="t"))
    assert [request.cache_salt for request in added] == ["", "s", "é", "", "s", "s", "s", "t"]
    keys = [request.prompt.images[0].image.key for request in added[3:]]
    assert keys[1] == keys[2] == keys[3]
    assert len(set(keys)) == 3


@pytest.mark.parametrize("salt", ["", "a" * 257, 5, b"bytes", "half \ud800"])
def test_a_wrong_salt_is_rejected_first(llm, salt):
    for run in (
        lambda: llm.generate(["a", {"prompt": "a", "cache_salt": salt}], GREEDY, use_tqdm=False),
        lambda: llm.chat(ask("a"), GREEDY, use_tqdm=False, cache_salt=salt),
        lambda: next(llm.stream(ask("a"), GREEDY, cache_salt=salt)),
    ):
        with pytest.raises(InvalidRequestError, match="cache_salt") as raised:
            run()
        assert raised.value.param == "cache_salt"
    assert not llm.engine.has_work()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "a", "prompt_token_ids": [1]}, "a text or a dict"),
        ({}, "a text or a dict"),
        ({"prompt": "a", "images": []}, "images"),
        ({"prompt": "a", "multi_modal_data": {"audio": 1}}, "audio"),
        ({"prompt": "a", "multi_modal_data": {"video": "clip.mp4"}}, "takes no videos|no file"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": Image.new("RGB", (9, 9))}}, "a text"),
        ({"prompt": "no placeholder", "multi_modal_data": {"image": Image.new("RGB", (9, 9))}}, "placeholder|image"),
        ("", "empty"),
    ],
)
def test_a_prompt_of_wrong_form_says_why(llm, prompt, message):
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, use_tqdm=False)


@pytest.mark.parametrize(
    ("bad", "error", "message", "runs"),
    [
        ([{"role": "wizard", "content": "hi"}], InvalidRequestError, r"^conversations\[2\]: messages\[0\].role", False),
        (
            ask("hi", Path("/no/such/file.png")),
            InvalidImageError,
            r"^conversations\[2\], messages\[0\].content\[0\].image: there is no file /no/such/file.png$",
            False,
        ),
        (ask("hi", b"no image"), InvalidImageError, r"^conversations\[2\]: ", True),
        (ask("hi", *[Image.new("RGB", (9, 9))] * 17), TooManyImagesError, r"^conversations\[2\]: ", True),
        (ask("too long " * 600), PromptTooLongError, r"^conversations\[2\]: ", True),
    ],
)
def test_a_bad_request_among_good_ones_is_named(llm, bad, error, message, runs):
    """Before anything runs, where nothing has to be prepared to see it."""
    with pytest.raises(error, match=message):
        llm.chat([ask("good"), ask("good too"), bad, ask("good")], GREEDY, use_tqdm=False)
    assert llm.engine.stats().steps == 0 or runs
    assert not llm.engine.has_work()
    assert llm.chat(ask("good"), GREEDY, use_tqdm=False)[0].outputs[0].text


@pytest.fixture
def broken(tmp_path) -> Path:
    path = tmp_path / "broken.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))
    return path


def test_bad_inputs_are_reported_with_files(llm, image, broken):
    url = "http://127.0.0.1:9/cat.jpg"
    conversations = [
        ask("good", image),
        ask("two of three", broken, image, url),
        ask("good"),
        ask("too long " * 600),
    ]
    with pytest.raises(InvalidRequestsError) as raised:
        llm.chat(conversations, GREEDY, use_tqdm=False)
    first, second, third = map(str, raised.value.errors)
    assert first.startswith(
        f"conversations[1], messages[0].content[0].image, {broken}: the image is truncated or broken"
    )
    assert second.startswith(f"conversations[1], messages[0].content[2].image: the file at {url} was not fetched")
    assert third.startswith("conversations[3]: This model's maximum context length is 512 tokens")
    assert all(line in str(raised.value) for line in (first, second, third))
    assert not llm.engine.has_work()


def test_missing_files_are_all_reported_before_anything_runs(llm):
    prompt = {"prompt": "<image><image>", "multi_modal_data": {"image": ["/no/one.png", "/no/two.png"]}}
    for run in (
        lambda: llm.generate(["good", prompt], GREEDY, use_tqdm=False),
        lambda: llm.chat([ask("good"), ask("a", "/no/one.png", "/no/two.png")], GREEDY, use_tqdm=False),
    ):
        with pytest.raises(InvalidRequestsError, match=r"(?s)\[1\], .*/no/one.png.*\[1\], .*/no/two.png"):
            run()
    assert llm.engine.stats().steps == 0


def test_returned_errors_spare_the_others(llm, image, broken):
    bad = ask("bad", broken)
    results = llm.chat([ask("a"), bad, ask("b", image), bad], GREEDY, use_tqdm=False, on_error="return")
    assert text_of([results[0], results[2]]) == text_of(llm.chat([ask("a"), ask("b", image)], GREEDY, use_tqdm=False))
    for number in (1, 3):
        assert isinstance(results[number], InvalidImageError)
        assert str(results[number]).startswith(f"conversations[{number}], messages[0].content[0].image, {broken}: ")
    with pytest.raises(InvalidRequestError, match="on_error must be raise or return"):
        llm.chat([ask("a")], GREEDY, use_tqdm=False, on_error="ignore")


def test_conversations_and_streams_name_the_file(llm, broken):
    for run in (lambda: llm.chat(ask("a", broken), use_tqdm=False), lambda: list(llm.stream(ask("a", broken)))):
        with pytest.raises(InvalidImageError, match=rf"^messages\[0\].content\[0\].image, {broken}: "):
            run()


def test_streams_prepare_a_bounded_part(folder, image, monkeypatch):
    llm = LLM(str(folder), engine="mock", prepare_ahead=3, max_num_seqs=2, num_workers=2)
    prepared = []
    chat = llm.preparer.chat
    monkeypatch.setattr(llm.preparer, "chat", lambda *args, **more: prepared.append(1) or chat(*args, **more))
    asked = 0

    def conversations():
        nonlocal asked
        for number in range(60):
            asked += 1
            yield ask(f"question {number}", image)

    texts = []
    for result in llm.chat(conversations(), GREEDY, use_tqdm=False, stream=True):
        texts.append(result.text)
        # Two run, three wait; those that finish in the same step as others are not yet yielded.
        assert len(prepared) <= asked <= len(texts) + 2 * (2 + 3)
    assert texts == text_of(llm.chat([ask(f"question {n}", image) for n in range(60)], GREEDY, use_tqdm=False))


def test_prepared_images_are_bounded_by_memory(folder, image):
    one = LLM(str(folder), engine="mock")
    image_bytes = one.preparer.chat(ask("a", image), allow_local=True).images[0].image.pixels.nbytes
    llm = LLM(str(folder), engine="mock", prepare_ahead_memory=image_bytes, max_num_seqs=1, num_workers=1)
    asked = 0

    def conversations():
        nonlocal asked
        for number in range(12):
            asked += 1
            yield ask(f"question {number}", image)

    for number, _ in enumerate(llm.chat(conversations(), GREEDY, use_tqdm=False, stream=True), start=1):
        assert asked <= number + 4
    assert asked == 12


def test_answered_images_of_a_list_are_freed(folder, monkeypatch):
    llm = LLM(str(folder), engine="mock", prepare_ahead=2, max_num_seqs=2, image_cache_memory=0, num_workers=1)
    images = []
    add = llm.engine.add

    def note(request):
        images.append(weakref.ref(request.prompt.images[0].image.pixels))
        add(request)

    monkeypatch.setattr(llm.engine, "add", note)
    conversations = (ask("What is this?", Image.new("RGB", (9, 9), (number, 0, 0))) for number in range(40))
    for _ in llm.chat(conversations, GREEDY, use_tqdm=False, stream=True):
        assert sum(image() is not None for image in images) <= 12
    assert len(images) == 40


def test_a_closed_stream_of_results_ends_all_requests(llm):
    results = llm.chat((ask(f"question {number}") for number in itertools.count()), GREEDY, use_tqdm=False, stream=True)
    assert next(results).text
    results.close()
    assert not llm.engine.has_work()


def test_a_stream_of_results_raises_what_is_wrong(llm, broken):
    results = llm.chat(iter([ask("a"), ask("b", broken)]), GREEDY, use_tqdm=False, stream=True)
    with pytest.raises(InvalidImageError, match=r"conversations\[1\]"):
        list(results)
    assert not llm.engine.has_work()
    results = llm.chat(iter([ask("a"), ask("b", broken)]), GREEDY, use_tqdm=False, stream=True, on_error="return")
    assert [type(one) for one in results] == [RequestOutput, InvalidImageError]


def test_several_answers_come_to_each_prompt(llm):
    params = SamplingParams(seed=5, n=3, max_tokens=8)
    [result] = llm.generate("hello", params, use_tqdm=False)
    alone = [llm.generate("hello", SamplingParams(seed=5 + i, max_tokens=8), use_tqdm=False)[0] for i in range(3)]
    assert [one.text for one in result.outputs] == text_of(alone)
    assert [one.index for one in result.outputs] == [0, 1, 2]
    assert result.text == result.outputs[0].text
    assert result.outputs[0].logprobs is None


def test_best_of_takes_the_highest_mean_logprob(llm):
    several = SamplingParams(seed=5, n=6, max_tokens=6, logprobs=0)
    [everyone] = llm.generate("hello", several, use_tqdm=False)
    ranked = sorted(everyone.outputs, key=lambda one: -one.cumulative_logprob / len(one.token_ids))
    [best] = llm.generate("hello", SamplingParams(seed=5, n=2, best_of=6, max_tokens=6), use_tqdm=False)
    assert [one.text for one in best.outputs] == [one.text for one in ranked[:2]]
    assert best.outputs[0].logprobs is None


def test_a_stream_of_text_has_one_answer(llm):
    with pytest.raises(InvalidRequestError, match="leave n and best_of out"):
        next(llm.stream(ask("a"), SamplingParams(n=2)))


def test_results_have_the_fields_that_vllm_has(llm, image):
    prompt = {"prompt": "a <image>", "multi_modal_data": {"image": image}}
    [result] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert (result.prompt, result.finished) == ("a <image>", True)
    assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("length", None)
    [chat] = llm.chat(ask("What is this?", image), GREEDY, use_tqdm=False)
    assert chat.prompt.count("<image>") == 1
    assert "What is this?" in chat.prompt
    first, second = chat.outputs[0].token_ids[:2]
    params = SamplingParams(temperature=0, stop_token_ids=[second])
    [stopped] = llm.chat(ask("What is this?", image), params, use_tqdm=False)
    assert (stopped.outputs[0].token_ids, stopped.outputs[0].stop_reason) == ([first], second)


def test_a_stop_string_is_the_reason(llm):
    [whole] = llm.generate("hello", GREEDY, use_tqdm=False)
    stop = whole.text[3:8]
    [cut] = llm.generate("hello", SamplingParams(temperature=0, stop=stop), use_tqdm=False)
    assert cut.text == whole.text.partition(stop)[0]
    assert cut.outputs[0].stop_reason == stop


def test_answer_ends_with_the_context(llm):
    left = llm.engine.info.max_prompt_len + 1 - len(llm.generate("hello", GREEDY, use_tqdm=False)[0].prompt_token_ids)
    with pytest.raises(InvalidRequestError, match=f"leaves {left} of the context"):
        llm.generate("hello", SamplingParams(min_tokens=left + 1), use_tqdm=False)
    assert not llm.engine.has_work()
    for wanted in (left, left + 1, 100 * left):
        [whole] = llm.generate("hello", SamplingParams(max_tokens=wanted, ignore_eos=True), use_tqdm=False)
        assert (len(whole.outputs[0].token_ids), whole.outputs[0].finish_reason) == (left, "length")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda llm: llm.chat("text"), "messages must be a list of messages"),
        (lambda llm: llm.chat({"role": "user", "content": "a"}), "messages must be a list of messages"),
        (lambda llm: llm.chat(["text"]), "messages must be a list of messages"),
        (lambda llm: llm.chat([5]), r"^conversations\[0\]: messages must be a list"),
        (lambda llm: llm.generate(b"text"), "a prompt is a text, a dict or a list of token ids, not bytes"),
        (lambda llm: llm.generate([5.5]), "a prompt is a text, a dict or a list of token ids, not float"),
        (lambda llm: llm.generate({"prompt_token_ids": "567"}), "prompt_token_ids must be a list of token ids"),
        (lambda llm: llm.generate({"prompt": "a", "multi_modal_data": "a.png"}), "must be a dict with"),
        (lambda llm: llm.generate("a", {"temperature": 0}), "sampling_params must be SamplingParams or a list"),
        (lambda llm: llm.generate(iter(["a"]), [GREEDY]), "one SamplingParams for all"),
        (lambda llm: llm.chat(ask("a"), chat_template_kwargs="enable_thinking"), "chat_template_kwargs must be a dict"),
    ],
)
def test_one_thing_where_several_are_meant_is_refused(llm, run, message):
    with pytest.raises(InvalidRequestError, match=message):
        run(llm)


def test_a_list_of_token_ids_is_one_prompt(llm):
    one, *_ = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
    assert one.prompt_token_ids == [5, 6, 7]
    two = llm.generate([[5, 6], [7]], GREEDY, use_tqdm=False)
    assert [result.prompt_token_ids for result in two] == [[5, 6], [7]]


def test_as_many_sampling_parameters_as_requests_are_wanted(llm):
    with pytest.raises(InvalidRequestError, match="3 conversations and 2 sampling"):
        llm.chat([ask("a")] * 3, [GREEDY] * 2, use_tqdm=False)
    assert not llm.engine.has_work()


def test_llm_takes_more_requests_than_servers_queue(folder):
    llm = LLM(str(folder), engine="mock", max_num_seqs=64)
    results = llm.generate(["hello"] * 5000, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert len(results) == 5000


def test_a_stop_string_ends_the_request(llm):
    [whole] = llm.generate("hello", GREEDY, use_tqdm=False)
    words = whole.outputs[0].text.split()
    stop = next(word for word in words[1:] if word not in words[0])
    [cut] = llm.generate("hello", SamplingParams(temperature=0, stop=(stop,)), use_tqdm=False)
    assert cut.outputs[0].finish_reason == "stop"
    assert cut.outputs[0].text == whole.outputs[0].text.partition(stop)[0]
    assert len(cut.outputs[0].token_ids) < len(whole.outputs[0].token_ids)
    assert not llm.engine.has_work()


def test_a_stream_brings_the_same_text_in_pieces(llm):
    pieces = list(llm.stream(ask("tell me more"), GREEDY))
    assert len(pieces) > 1
    assert "".join(pieces) == text_of(llm.chat(ask("tell me more"), GREEDY, use_tqdm=False))[0]


@pytest.mark.parametrize(
    "options", [{"chat_template_kwargs": {"enable_thinking": False}}, {"add_generation_prompt": False}], ids=str
)
def test_a_stream_takes_what_a_chat_takes(folder, image, tmp_path, options):
    llm = LLM(str(teach_thoughts(copytree(folder, tmp_path / "model"))), engine="mock")
    question = ask("tell me more", image)
    expected = text_of(llm.chat(question, GREEDY, use_tqdm=False, **options))[0]
    assert "".join(llm.stream(question, GREEDY, **options)) == expected
    assert expected != text_of(llm.chat(question, GREEDY, use_tqdm=False))[0]
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs must be a dict"):
        next(llm.stream(question, chat_template_kwargs="enable_thinking"))
    with pytest.raises(InvalidRequestError, match="max_pixels is 300"):
        next(llm.stream(question, mm_processor_kwargs={"max_pixels": 300}))


def test_a_closed_stream_ends_its_request(llm):
    stream = llm.stream(ask("tell me more"), SamplingParams(temperature=0, ignore_eos=True))
    next(stream)
    assert llm.engine.has_work()
    stream.close()
    assert not llm.engine.has_work()


def test_a_stream_continues_after_other_requests(llm):
    expected = list(llm.stream(ask("tell me more"), GREEDY))
    stream = llm.stream(ask("tell me more"), GREEDY)
    pieces = [next(stream)]
    llm.chat([ask("other")] * 3, GREEDY, use_tqdm=False)
    pieces += stream
    assert "".join(pieces) == "".join(expected)


@pytest.fixture
def interruptible():
    """SIGINT as it is in a terminal; programs in the background start with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_the_engine_usable(llm, monkeypatch):
    step, after_the_signal = llm.engine.step, []

    def interrupted_step():
        outputs = step()
        os.kill(os.getpid(), signal.SIGINT)
        after_the_signal.append(len(outputs))
        return outputs

    monkeypatch.setattr(llm.engine, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], SamplingParams(temperature=0, ignore_eos=True), use_tqdm=False)
    assert len(after_the_signal) == 1
    assert after_the_signal[0] >= 1
    assert not llm.engine.has_work()
    monkeypatch.undo()
    assert text_of(llm.generate("hello", GREEDY, use_tqdm=False))[0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failing_request_fails_alone(llm, monkeypatch):
    step = llm.engine.step

    def failing_step():
        outputs = step()
        victim = outputs[0]
        llm.engine.abort([victim.request_id])
        monkeypatch.undo()
        return [EngineOutput(victim.request_id, [], "error", error="the numbers are no numbers"), *outputs[1:]]

    monkeypatch.setattr(llm.engine, "step", failing_step)
    first, second = llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert (first.outputs[0].finish_reason, first.outputs[0].error) == ("error", "the numbers are no numbers")
    assert second.outputs[0].finish_reason == "stop"
    assert second.outputs[0].error is None

    monkeypatch.setattr(llm.engine, "step", failing_step)
    with pytest.raises(VLMServeError, match="the numbers are no numbers"):
        list(llm.stream(ask("a"), GREEDY))


def test_without_parameters_the_checkpoint_decides_how_to_sample(folder, tmp_path):
    assert LLM(str(folder), engine="mock").default_sampling_params == GREEDY
    make_mock_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert LLM(str(tmp_path), engine="mock").default_sampling_params == SamplingParams()
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}')
    assert LLM(str(tmp_path), engine="mock").default_sampling_params == SamplingParams(temperature=0.6, top_p=0.9)
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    assert LLM(str(tmp_path), engine="mock").default_sampling_params == SamplingParams()


def test_decisions_read_each_image_once(folder, image, monkeypatch):
    chat = [{"role": "user", "content": [{"type": "image", "image": str(image)}]}]
    reads, read = [], sources.read_source
    monkeypatch.setattr(sources, "read_source", lambda source, *rest: reads.append(source) or read(source, *rest))
    values = LLM(str(folder), engine="mock").decide(chat, [Question.predicate("a"), Question.predicate("b")])
    assert len(values) == 2
    assert reads == [str(image)]


def test_decisions_share_their_beginning_without_thoughts(folder, tmp_path, monkeypatch, image):
    llm = LLM(str(teach_thoughts(copytree(folder, tmp_path / "thinking"))), engine="mock")
    added, add = [], llm.engine.add

    def record(request):
        added.append(request)
        add(request)

    monkeypatch.setattr(llm.engine, "add", record)
    chat = [{"role": "user", "content": [{"type": "image", "image": image}]}]
    questions = [Question.predicate("It is red."), Question.choice("What is it?", ["a cat", "a cat, but", "a dog"])]
    values = llm.decide(chat, questions, use_tqdm=False)
    assert [len(one) for one in values] == [2, 3]
    first, *others = added
    assert first.task == Prefill()
    assert first.prompt.images
    assert [len(one.task.continuations) for one in others] == [2, 3]
    assert all(one.prompt.token_ids[: len(first.prompt.token_ids)] == first.prompt.token_ids for one in others)
    begun = [llm.preparer.decode(one.prompt.token_ids) for one in others]
    assert all(text.endswith("</think>\n\n") for text in begun)
    llm.decide(chat, questions[:1], use_tqdm=False, chat_template_kwargs={"enable_thinking": True})
    text = llm.preparer.decode(added[-1].prompt.token_ids)
    assert text.endswith("<think>\n")
    with pytest.raises(InvalidRequestError, match="at least one question"):
        llm.decide(chat, [])


def test_progress_is_shown_on_stderr(llm, capsys):
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr()
    assert "2/2" in shown.err
    assert shown.out == ""
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": 1}, "temperature"), ({"dtype": "int8"}, "dtype"), ({"max_images": -1}, "max_images")],
)
def test_a_wrong_option_is_named(folder, options, message):
    with pytest.raises(ConfigurationError, match=message):
        LLM(str(folder), engine="mock", **options)


def test_limits_on_images_are_options_too(folder):
    llm = LLM(str(folder), engine="mock", max_images=1)
    with pytest.raises(TooManyImagesError):
        llm.chat(ask("hi", *[Image.new("RGB", (9, 9))] * 2), use_tqdm=False)


def test_a_missing_model_is_an_error():
    with pytest.raises(CheckpointNotFoundError, match="no/such"):
        LLM("./no/such/folder")


def test_first_use_loads_a_lazy_model(folder, monkeypatch):
    import vlmserve.engine

    loaded = []
    create = vlmserve.engine.create_engine
    monkeypatch.setattr(vlmserve.engine, "create_engine", lambda *args: loaded.append(args) or create(*args))
    llm = LLM(str(folder), engine="mock", load="lazy")
    assert loaded == []
    for _ in range(2):
        llm.chat(ask("What is this?"), GREEDY, use_tqdm=False)
    assert len(loaded) == 1


def test_images_are_held_back_on_request_only(folder):
    config = LLM(str(folder), engine="mock", load="lazy").config
    assert (config.encoder_step_share, config.step_seconds) == (math.inf, math.inf)
    assert LLM(str(folder), engine="mock", load="lazy", encoder_step_share=0.5).config.encoder_step_share == 0.5


def test_logprobs_begin_with_the_chosen_token(llm):
    params = [SamplingParams(temperature=0, max_tokens=6, logprobs=count) for count in (0, 3)]
    alone, rivals = (result.outputs[0] for result in llm.generate(["hello"] * 2, params, use_tqdm=False))
    assert [list(told) for told in alone.logprobs] == [[token_id] for token_id in alone.token_ids]
    for token_id, told in zip(rivals.token_ids, rivals.logprobs, strict=True):
        assert next(iter(told)) == token_id
        assert [one.rank for one in told.values()] == [1, 2, 3]
        assert [one.logprob for one in told.values()] == sorted((one.logprob for one in told.values()), reverse=True)
    assert (
        "".join(told[token].decoded_token for token, told in zip(rivals.token_ids, rivals.logprobs, strict=True))
        == rivals.text
    )
    assert rivals.cumulative_logprob == alone.cumulative_logprob < 0
    [silent] = llm.generate("hello", GREEDY, use_tqdm=False)
    assert silent.outputs[0].logprobs is silent.outputs[0].cumulative_logprob is silent.prompt_logprobs is None


def test_prompt_logprobs_leave_out_images(llm, image):
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    [result] = llm.chat(ask("What is this?", image), params, use_tqdm=False)
    told = result.prompt_logprobs
    assert len(told) == len(result.prompt_token_ids)
    for place, (token_id, one) in enumerate(zip(result.prompt_token_ids, told, strict=True)):
        assert (one is None) == (place == 0 or token_id == IMAGE_TOKEN_ID)
        assert one is None or next(iter(one)) == token_id


def test_truncated_prompts_keep_their_end(llm):
    [whole] = llm.generate(["one two three four"], GREEDY)
    [cut] = llm.generate(["one two three four"], SamplingParams(temperature=0, truncate_prompt_tokens=2))
    assert cut.prompt_token_ids == whole.prompt_token_ids[-2:]


def test_chat_continues_the_last_message(llm):
    begun = [*ask("What is this?"), {"role": "assistant", "content": "It is a"}]
    [continued] = llm.chat([begun], GREEDY, continue_final_message=True)
    [closed] = llm.chat([begun], GREEDY, add_generation_prompt=False)
    assert continued.prompt.endswith("It is a")
    assert closed.prompt.startswith(continued.prompt)
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        llm.chat([ask("What is this?")], GREEDY, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="whole answer"):
        llm.chat([begun], GREEDY, schema={"type": "object"}, continue_final_message=True)
