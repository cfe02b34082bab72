import { Cloud, Keyboard, Pencil, Plus, Trash2 } from "lucide-react";
import { useState } from "react";
import { explain, type Problem } from "../api/problems";
import { go, hrefOf } from "../route";
import { remove, rename, useSession } from "../state/session";
import type { Conversation } from "../state/types";
import { Dialog } from "./dialog";

interface Props {
  open: boolean;
  current?: string;
  onShortcuts: () => void;
  onClose: () => void;
}

/** All conversations. On a narrow screen it lies over the chat while it is open. */
export function Sidebar({ open, current, onShortcuts, onClose }: Props) {
  const { ready, conversations } = useSession();
  const [renamed, setRenamed] = useState<Conversation>();
  const [deleted, setDeleted] = useState<Conversation>();
  return (
    <aside
      className={open ? "sidebar open" : "sidebar"}
      aria-label="Conversations"
      onKeyDown={(event) => event.key === "Escape" && onClose()}
    >
      <a className="new" href={hrefOf({ view: "chat" })} onClick={onClose}>
        <Plus aria-hidden /> New conversation
      </a>
      <ul>
        {conversations.map((conversation) => (
          <li key={conversation.id} className={conversation.id === current ? "current" : undefined}>
            <a href={hrefOf({ view: "chat", id: conversation.id })} aria-current={conversation.id === current ? "page" : undefined}>
              {conversation.place === "server" && <Cloud aria-label="Stored on the server" />}
              <span>{conversation.title}</span>
            </a>
            <button className="icon small" aria-label={`Rename ${conversation.title}`} onClick={() => setRenamed(conversation)}>
              <Pencil />
            </button>
            <button className="icon small" aria-label={`Delete ${conversation.title}`} onClick={() => setDeleted(conversation)}>
              <Trash2 />
            </button>
          </li>
        ))}
      </ul>
      {ready && conversations.length === 0 && <p className="hint">Your conversations appear here.</p>}
      <button className="quiet shortcuts" onClick={onShortcuts}>
        <Keyboard aria-hidden /> Keyboard shortcuts
      </button>
      {renamed && <RenameDialog conversation={renamed} onClose={() => setRenamed(undefined)} />}
      {deleted && (
        <DeleteDialog
          conversation={deleted}
          onClose={() => setDeleted(undefined)}
          onDeleted={() => deleted.id === current && go({ view: "chat" })}
        />
      )}
    </aside>
  );
}

function RenameDialog({ conversation, onClose }: { conversation: Conversation; onClose: () => void }) {
  const [title, setTitle] = useState(conversation.title);
  const [problem, setProblem] = useState<Problem>();
  async function submit(): Promise<void> {
    try {
      await rename(conversation.id, title.trim() || conversation.title);
      onClose();
    } catch (error) {
      setProblem(explain(error));
    }
  }
  return (
    <Dialog title="Rename the conversation" onClose={onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void submit();
        }}
      >
        {problem && <ProblemText problem={problem} />}
        <label>
          Title
          <input value={title} maxLength={200} autoFocus onChange={(event) => setTitle(event.target.value)} />
        </label>
        <div className="buttons">
          <button type="button" onClick={onClose}>
            Cancel
          </button>
          <button className="primary">Rename</button>
        </div>
      </form>
    </Dialog>
  );
}

function DeleteDialog({ conversation, onClose, onDeleted }: { conversation: Conversation; onClose: () => void; onDeleted: () => void }) {
  const [problem, setProblem] = useState<Problem>();
  async function confirm(): Promise<void> {
    try {
      await remove(conversation.id);
      onClose();
      onDeleted();
    } catch (error) {
      setProblem(explain(error));
    }
  }
  const place = conversation.place === "server" ? "the server" : "this browser";
  return (
    <Dialog title="Delete this conversation?" onClose={onClose}>
      {problem && <ProblemText problem={problem} />}
      <p>
        "{conversation.title}" and its images are deleted from {place}. This cannot be undone.
      </p>
      <div className="buttons">
        <button onClick={onClose} autoFocus>
          Keep it
        </button>
        <button className="danger" onClick={() => void confirm()}>
          Delete
        </button>
      </div>
    </Dialog>
  );
}

function ProblemText({ problem }: { problem: Problem }) {
  return (
    <p className="problem" role="alert">
      <strong>{problem.title}.</strong> {problem.detail}
    </p>
  );
}
