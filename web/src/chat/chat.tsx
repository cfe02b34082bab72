import { Brush, ImagePlus, MessagesSquare, Shapes } from "lucide-react";
import { useCallback, useEffect, useRef, useState } from "react";
import { flushSync } from "react-dom";
import { explain, type Problem } from "../api/problems";
import type { Model } from "../api/server";
import { megabytes } from "../format";
import { go } from "../route";
import { useShortcuts } from "../shortcuts";
import { readDraft, saveDraft } from "../state/database";
import { getSettings } from "../state/settings";
import { allShrunk } from "../state/shrink";
import { ask, find, isLoaded, load, stop, useSession } from "../state/session";
import type { Conversation, Attachment, Turn } from "../state/types";
import { Composer } from "./composer";
import { DrawDialog } from "./draw-dialog";
import { sample } from "./drawing";
import { attachmentsOf } from "./attachments";
import { TurnView } from "./turn";
import { useDropAndPaste } from "./drop-and-paste";

const NOT_SHOWN: Problem = { title: "No model reads this file", detail: "Images, PDF and TIFF documents, and videos can be shown." };
const DRAFT_DELAY = 300;
/** Base64 characters per byte. */
const BASE64 = 4 / 3;
/** Pixels from its end within which a conversation follows what comes. */
const NEAR = 120;

/** A conversation, or the beginning of one. model: the server's own. */
export function Chat({ id, model, onKey }: { id?: string; model?: Model; onKey: () => void }) {
  const { ready, answering, notes } = useSession();
  const conversation = id === undefined ? undefined : find(id);
  const [text, setText] = useDraft(id ?? "new");
  const [attachments, setAttachments] = useState<Attachment[]>([]);
  const [problem, setProblem] = useState<Problem>();
  const [sending, setSending] = useState(false);
  const [drawing, setDrawing] = useState(false);
  const [editing, setEditing] = useState<string>();
  const area = useRef<HTMLTextAreaElement>(null);
  const busy = id !== undefined && answering.has(id);
  useLoad(id, ready, setProblem);
  const dragging = useDropAndPaste((files) => {
    const dropped = attachmentsOf(files);
    setAttachments((before) => [...before, ...dropped]);
    setProblem(dropped.length > 0 ? undefined : NOT_SHOWN);
  });
  const end = useFollow(conversation);

  useShortcuts({ "/": () => area.current?.focus(), d: () => setDrawing(true) });
  useEffect(() => {
    function press(event: KeyboardEvent): void {
      if (event.key === "Escape" && busy && !document.querySelector("dialog[open]")) stop(id!);
    }
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [busy, id]);

  async function send(question: string, shown: Attachment[]): Promise<void> {
    if ((!question.trim() && shown.length === 0) || busy || sending) return;
    const place = conversation?.place ?? getSettings().place;
    setSending(true);
    setProblem(undefined);
    try {
      const fitting = await allShrunk(shown, model?.useful_image_pixels);
      const excess = tooLarge(fitting, place === "server", model);
      if (excess) return setProblem(excess);
      const conversationId = await ask(id, question.trim(), fitting);
      setText("");
      setAttachments([]);
      if (conversationId !== id) go({ view: "chat", id: conversationId });
    } catch (error) {
      setProblem(explain(error));
    } finally {
      setSending(false);
    }
  }

  const lastQuestion = conversation?.turns.findLast((turn) => turn.role === "user");
  return (
    <main id="main" className={dragging ? "chat dragging" : "chat"} tabIndex={-1}>
      <h1 className="visually-hidden">{conversation?.title ?? "New conversation"}</h1>
      <div className="turns">
        {conversation && conversation.turns.length > 0 ? (
          <ol>
            {conversation.turns.map((turn, index) => (
              <TurnView
                key={turn.id}
                conversation={conversation.id}
                turn={turn}
                question={conversation.turns[index - 1]}
                shown={attachedBefore(conversation.turns, index)}
                model={model?.id}
                busy={busy}
                note={turn.ending === undefined ? notes[conversation.id] : undefined}
                editing={editing === turn.id}
                onEdit={setEditing}
                onKey={onKey}
              />
            ))}
          </ol>
        ) : (
          ready && !(problem && id !== undefined) && (
            <Welcome
              known={id === undefined || isLoaded(id)}
              model={model}
              onSample={() => void sample().then((attachment) => setAttachments((before) => [...before, attachment]))}
            />
          )
        )}
        <div ref={end} />
      </div>
      <Announcer conversation={conversation} />
      <div className="ask">
        {problem && (
          <p className="problem" role="alert">
            <strong>{problem.title}.</strong> {problem.detail}
          </p>
        )}
        <Composer
          area={area}
          text={text}
          attachments={attachments}
          answering={busy}
          sending={sending}
          onText={setText}
          onAttachments={setAttachments}
          onDraw={() => setDrawing(true)}
          onSend={(question) => void send(question, attachments)}
          onStop={() => stop(id!)}
          onEditLast={() => !busy && setEditing(lastQuestion?.id)}
        />
      </div>
      {drawing && (
        <DrawDialog
          onClose={() => setDrawing(false)}
          onAdd={(attachment) => {
            flushSync(() => {
              setAttachments([...attachments, attachment]);
              setDrawing(false);
            });
            area.current?.focus();
          }}
          onAsk={(attachment, question) => {
            setDrawing(false);
            void send(question, [...attachments, attachment]);
          }}
        />
      )}
    </main>
  );
}

/** Why files are more than a request may have. oneByOne: each is sent by itself. */
function tooLarge(shown: Attachment[], oneByOne: boolean, model?: Model): Problem | undefined {
  const sizes = shown.map(({ blob }) => blob?.size ?? 0);
  const size = oneByOne ? Math.max(0, ...sizes) : sizes.reduce((sum, one) => sum + one, 0);
  const most = (model?.max_request_bytes ?? Infinity) / (oneByOne ? 1 : BASE64);
  if (size <= most) return undefined;
  const subject = oneByOne ? "A file has" : "The files have";
  const detail = `${subject} ${megabytes(size)}; this server takes ${megabytes(most)}. Use fewer or smaller files.`;
  return { title: "That is too large for this server", detail };
}

/** The files that were attached last before a turn. */
function attachedBefore(turns: Turn[], index: number): Attachment[] | undefined {
  return turns.slice(0, index).findLast((turn) => turn.attachments.length > 0)?.attachments;
}

/** The model in the package, which can do little. */
const BUILT_IN = "pixie";

function Welcome({ known, model, onSample }: { known: boolean; model?: Model; onSample: () => void }) {
  if (!known) return <p className="hint">Loading the conversation from the server.</p>;
  return (
    <div className="welcome">
      <h2>Ask about an image</h2>
      {model?.id === BUILT_IN && (
        <p className="hint">
          pixie, the tiny built-in model, answers. It names drawn shapes, their colours and places, counts them, and reads a number or a word, but
          knows nothing of photos. <code>vlmserve doctor</code> says which real models run on this machine.
        </p>
      )}
      <button type="button" onClick={onSample}>
        <Shapes aria-hidden /> Try a sample image
      </button>
      <ul>
        <li>
          <Brush aria-hidden />
          <span>
            <strong>Draw</strong> a few coloured shapes, and let the model tell what it sees.
          </span>
        </li>
        <li>
          <ImagePlus aria-hidden />
          <span>
            <strong>Drop, paste or choose</strong> images, PDF documents and videos.
          </span>
        </li>
        <li>
          <MessagesSquare aria-hidden />
          <span>
            <strong>Ask further questions.</strong> The image is cached, so their answers begin sooner.
          </span>
        </li>
      </ul>
    </div>
  );
}

/** Tells those who listen to the page that an answer has begun, and all of it once it is there. */
function Announcer({ conversation }: { conversation?: Conversation }) {
  const answer = conversation?.turns.at(-1);
  const came = useRef(false);
  if (answer?.role === "assistant" && answer.ending === undefined) came.current = true;
  let said = "";
  if (came.current && answer?.role === "assistant") {
    if (answer.ending === undefined) said = "The answer is being generated.";
    else if (answer.problem) said = `${answer.problem.title}. ${answer.problem.detail}`;
    else said = `${answer.ending === "stopped" ? "Stopped. " : ""}${answer.text}`;
  }
  return (
    <div className="visually-hidden" aria-live="polite">
      {said}
    </div>
  );
}

function useLoad(id: string | undefined, ready: boolean, onProblem: (problem: Problem) => void): void {
  const report = useRef(onProblem);
  useEffect(() => {
    if (ready && id !== undefined && !isLoaded(id)) load(id).catch((error) => report.current(explain(error)));
  }, [id, ready]);
}

/** The unsent question, kept in the browser. */
function useDraft(name: string): [string, (text: string) => void] {
  const [text, setText] = useState("");
  const timer = useRef<ReturnType<typeof setTimeout>>(undefined);
  const touched = useRef(false);
  useEffect(() => {
    readDraft(name).then(
      (draft) => touched.current || setText(draft),
      () => undefined, // this browser keeps nothing
    );
  }, [name]);
  const change = useCallback(
    (next: string) => {
      touched.current = true;
      setText(next);
      clearTimeout(timer.current);
      const save = () => saveDraft(name, next).catch(() => undefined); // as above
      if (next) timer.current = setTimeout(save, DRAFT_DELAY);
      else void save();
    },
    [name],
  );
  return [text, change];
}

/** Keeps the end of a conversation in sight while it grows, unless somebody has scrolled away from it. */
function useFollow(conversation?: Conversation) {
  const end = useRef<HTMLDivElement>(null);
  const near = useRef(true);
  useEffect(() => {
    const scroller = end.current!.parentElement!;
    let before = scroller.scrollTop;
    const look = () => {
      const top = scroller.scrollTop;
      // New text also moves the end away. Only a user who scrolls up wants to stay there.
      if (scroller.scrollHeight - top - scroller.clientHeight < NEAR) near.current = true;
      else if (top < before) near.current = false;
      before = top;
    };
    scroller.addEventListener("scroll", look, { passive: true });
    const growth = new ResizeObserver(() => near.current && scroller.scrollTo({ top: scroller.scrollHeight }));
    for (const child of scroller.children) growth.observe(child);
    return () => {
      scroller.removeEventListener("scroll", look);
      growth.disconnect();
    };
  }, [!conversation?.turns.length]);
  const count = conversation?.turns.length;
  useEffect(() => {
    const scroller = end.current!.parentElement!;
    near.current = true;
    scroller.scrollTo({ top: scroller.scrollHeight });
  }, [count]);
  return end;
}
