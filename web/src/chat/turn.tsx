import { KeyRound, Pencil, RefreshCw, TriangleAlert } from "lucide-react";
import { memo, useEffect, useMemo, useRef, useState } from "react";
import type { Problem } from "../api/problems";
import { describeCost } from "../format";
import { coarse } from "../pointer";
import { askAgain, type Note } from "../state/session";
import type { Attachment, Turn } from "../state/types";
import { CopyButton } from "./copy-button";
import { Markdown } from "./markdown";
import { MarkedImage } from "./marked-image";
import { marksIn } from "./marks";
import { Attachments } from "./attachments";

interface Props {
  conversation: string;
  turn: Turn;
  /** An answer's question. */
  question?: Turn;
  /** The latest files before an answer. */
  shown?: Attachment[];
  /** The server's own model. */
  model?: string;
  busy: boolean;
  note?: Note;
  editing: boolean;
  onEdit: (id: string | undefined) => void;
  onKey: () => void;
}

/** A question or an answer. */
export const TurnView = memo(function TurnView(props: Props) {
  return props.turn.role === "user" ? <Question {...props} /> : <Answer {...props} />;
});

function Question({ conversation, turn, busy, editing, onEdit }: Props) {
  if (editing) return <Editor conversation={conversation} turn={turn} onEnd={() => onEdit(undefined)} />;
  return (
    <li className="turn question">
      <h2 className="visually-hidden">You asked</h2>
      <Attachments attachments={turn.attachments} />
      {turn.text && (
        <p className="text" dir="auto">
          {turn.text}
        </p>
      )}
      <div className="actions">
        {turn.text && <CopyButton text={turn.text} what="the question" />}
        {!busy && (
          <button className="icon small" aria-label="Edit the question" title="Edit and ask again" onClick={() => onEdit(turn.id)}>
            <Pencil />
          </button>
        )}
      </div>
    </li>
  );
}

function Editor({ conversation, turn, onEnd }: { conversation: string; turn: Turn; onEnd: () => void }) {
  const [text, setText] = useState(turn.text);
  const [attachments, setAttachments] = useState(turn.attachments);
  const area = useRef<HTMLTextAreaElement>(null);
  useEffect(() => {
    area.current!.focus();
    area.current!.setSelectionRange(turn.text.length, turn.text.length);
  }, [turn.text]);
  const empty = !text.trim() && attachments.length === 0;
  function send(): void {
    if (empty) return;
    onEnd();
    askAgain(conversation, turn.id, { text: text.trim(), attachments });
  }
  return (
    <li className="turn question">
      <form
        className="editor"
        onSubmit={(event) => {
          event.preventDefault();
          send();
        }}
      >
        <Attachments attachments={attachments} onChange={setAttachments} />
        <textarea
          dir="auto"
          ref={area}
          aria-label="Edited question"
          value={text}
          onChange={(event) => setText(event.target.value)}
          onKeyDown={(event) => {
            if (event.key === "Escape") onEnd();
            if (event.key === "Enter" && !event.shiftKey && !event.nativeEvent.isComposing && !coarse.matches) {
              event.preventDefault();
              send();
            }
          }}
        />
        <p className="hint">Later turns are replaced.</p>
        <div className="buttons">
          <button type="button" onClick={onEnd}>
            Cancel
          </button>
          <button className="primary" disabled={empty}>
            Ask again
          </button>
        </div>
      </form>
    </li>
  );
}

function Answer({ conversation, turn, question, shown = [], model, busy, note, onKey }: Props) {
  const again = () => question && askAgain(conversation, question.id);
  const coming = turn.ending === undefined;
  const images = shown.filter((attachment) => attachment.kind === "image");
  // The question's own images come last. Pages of documents and videos have sizes, too.
  const sizes = images.length === shown.length ? turn.imageSizes?.slice(-images.length) : undefined;
  const marks = useMemo(() => (coming ? [] : marksIn(turn.text)), [coming, turn.text]);
  return (
    <li className="turn answer" aria-busy={coming}>
      <h2 className="visually-hidden">Answer</h2>
      {turn.thoughts && (
        <details className="thoughts">
          <summary>{coming && !turn.text ? "Thinking" : "Thoughts"}</summary>
          <p dir="auto">{turn.thoughts}</p>
        </details>
      )}
      {turn.text && <Markdown text={turn.text} />}
      {images.length > 0 && marks.length > 0 && (
        <MarkedImage images={images} sizes={sizes} marks={marks} model={turn.model ?? model} />
      )}
      {coming && !turn.text && (
        <p className="thinking">
          <span className="dots" aria-hidden>
            <i />
            <i />
            <i />
          </span>
          <span className={note?.text ? "" : "visually-hidden"}>{note?.text || "Waiting for the answer"}</span>
          {note?.share !== undefined && <progress value={note.share} aria-label={note.text} />}
        </p>
      )}
      {coming && turn.text && note?.text && <p className="cost">{note.text}</p>}
      {turn.problem && <Failure problem={turn.problem} onAgain={again} onKey={onKey} busy={busy} />}
      {turn.ending === "stopped" && <p className="ended">Stopped.</p>}
      {turn.ending === "length" && <p className="ended">Cut off: the answer reached the token limit.</p>}
      {!coming && (
        <div className="actions">
          {turn.text && <CopyButton text={turn.text} what="the answer" />}
          {!busy && !turn.problem && (
            <button className="icon small" aria-label="Answer again" title="Answer again" onClick={again}>
              <RefreshCw />
            </button>
          )}
          {turn.cost && <span className="cost">{[turn.model, describeCost(turn.cost)].filter(Boolean).join(" · ")}</span>}
        </div>
      )}
    </li>
  );
}

function Failure({ problem, busy, onAgain, onKey }: { problem: Problem; busy: boolean; onAgain: () => void; onKey: () => void }) {
  return (
    <div className="problem">
      <TriangleAlert aria-hidden />
      <p>
        <strong>{problem.title}.</strong> {problem.detail}
      </p>
      <div className="buttons">
        {problem.remedy === "key" && (
          <button onClick={onKey}>
            <KeyRound aria-hidden /> Enter a key
          </button>
        )}
        <button disabled={busy} onClick={onAgain}>
          <RefreshCw aria-hidden /> Try again
        </button>
      </div>
    </div>
  );
}
