import { Brush, Paperclip, SendHorizontal, Square } from "lucide-react";
import { useEffect, useRef, type RefObject } from "react";
import { coarse } from "../pointer";
import type { Attachment } from "../state/types";
import { ACCEPTED, Attachments, attachmentsOf } from "./attachments";

interface Props {
  area: RefObject<HTMLTextAreaElement | null>;
  text: string;
  attachments: Attachment[];
  answering: boolean;
  sending: boolean;
  onText: (text: string) => void;
  onAttachments: (attachments: Attachment[]) => void;
  onDraw: () => void;
  onSend: (text: string) => void;
  onStop: () => void;
  onEditLast: () => void;
}

const ABOUT_IMAGES = ["What is in the image?", "How many objects are there?", "Describe the image."];
const ABOUT_DOCUMENTS = ["What is this document about?", "Write down its text.", "What do its tables say?"];

/** The field for a question and its files. */
export function Composer(props: Props) {
  const { area, text, attachments, answering, sending, onText, onAttachments, onSend } = props;
  const files = useRef<HTMLInputElement>(null);
  const empty = !text.trim() && attachments.length === 0;

  useEffect(() => {
    if (!coarse.matches) area.current!.focus();
  }, [area]);
  useEffect(() => {
    const element = area.current!;
    element.style.height = "auto";
    element.style.height = `${element.scrollHeight}px`;
  }, [text, area]);

  function press(event: React.KeyboardEvent): void {
    // On a phone's keyboard, Enter is the only way to a new line.
    if (event.key === "Enter" && !event.shiftKey && !event.nativeEvent.isComposing && !coarse.matches) {
      event.preventDefault();
      onSend(text);
    } else if (event.key === "ArrowUp" && text === "") {
      event.preventDefault();
      props.onEditLast();
    }
  }

  return (
    <form
      className="composer"
      aria-label="Ask"
      onSubmit={(event) => {
        event.preventDefault();
        onSend(text);
      }}
    >
      {attachments.length > 0 && !text && !answering && (
        <div className="suggestions" role="group" aria-label="Suggested questions">
          {(attachments.some((one) => one.kind === "document") ? ABOUT_DOCUMENTS : ABOUT_IMAGES).map((suggestion) => (
            <button key={suggestion} type="button" onClick={() => onSend(suggestion)}>
              {suggestion}
            </button>
          ))}
        </div>
      )}
      <div className="box">
        <Attachments attachments={attachments} onChange={onAttachments} />
        <textarea
          dir="auto"
          ref={area}
          rows={1}
          aria-label="Question"
          placeholder="Ask about an image"
          value={text}
          onChange={(event) => onText(event.target.value)}
          onKeyDown={press}
        />
        <div className="tools">
          <input
            ref={files}
            type="file"
            accept={ACCEPTED}
            multiple
            hidden
            aria-label="Choose files"
            onChange={(event) => {
              onAttachments([...attachments, ...attachmentsOf(event.target.files ?? [])]);
              event.target.value = "";
            }}
          />
          <button type="button" className="tool" onClick={() => files.current!.click()}>
            <Paperclip aria-hidden /> Files
          </button>
          <button type="button" className="tool" onClick={props.onDraw}>
            <Brush aria-hidden /> Draw
          </button>
          {answering ? (
            <button type="button" className="primary send" onClick={props.onStop}>
              <Square aria-hidden /> Stop
            </button>
          ) : (
            <button className="primary send" disabled={empty || sending}>
              <SendHorizontal aria-hidden /> Ask
            </button>
          )}
        </div>
      </div>
    </form>
  );
}
