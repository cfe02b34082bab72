import { ArrowDownUp, Cloud, Keyboard, Pencil, Plus, Trash2 } from "lucide-react";
import { useState } from "react";
import { explain, type Problem } from "../api/problems";
import { go, hrefOf } from "../route";
import { remove, rename, useSession } from "../state/session";
import { matches, shelves } from "../state/shelf";
import type { Conversation } from "../state/types";
import { Dialog } from "./dialog";
import { ExchangeDialog } from "./exchange-dialog";

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
  const [search, setSearch] = useState("");
  const [exchange, setExchange] = useState(false);
  const wanted = search.trim();
  const found = wanted ? conversations.filter((conversation) => matches(conversation, wanted)) : conversations;
  return (
    <aside
      className={open ? "sidebar open" : "sidebar"}
      aria-label="Conversations"
      onKeyDown={(event) => event.key === "Escape" && onClose()}
    >
      <a className="new" href={hrefOf({ view: "chat" })} onClick={onClose}>
        <Plus aria-hidden /> New conversation
      </a>
      {conversations.length > 0 && (
        <input
          type="search"
          dir="auto"
          aria-label="Search conversations"
          placeholder="Search"
          value={search}
          onChange={(event) => setSearch(event.target.value)}
        />
      )}
      <div className="shelves">
        {shelves(found, new Date()).map(({ label, conversations: dated }) => (
          <section key={label} aria-label={label}>
            <h2>{label}</h2>
            <ul>
              {dated.map((conversation) => (
                <Entry
                  key={conversation.id}
                  conversation={conversation}
                  current={conversation.id === current}
                  onRename={() => setRenamed(conversation)}
                  onDelete={() => setDeleted(conversation)}
                />
              ))}
            </ul>
          </section>
        ))}
        {ready && found.length === 0 && <p className="hint">{wanted ? "No conversation has these words." : "Your conversations appear here."}</p>}
      </div>
      <button className="quiet" onClick={() => setExchange(true)}>
        <ArrowDownUp aria-hidden /> Export and import
      </button>
      <button className="quiet shortcuts" onClick={onShortcuts}>
        <Keyboard aria-hidden /> Keyboard shortcuts
      </button>
      {exchange && <ExchangeDialog current={current} onClose={() => setExchange(false)} />}
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

interface EntryProps {
  conversation: Conversation;
  current: boolean;
  onRename: () => void;
  onDelete: () => void;
}

function Entry({ conversation, current, onRename, onDelete }: EntryProps) {
  const { id, title, place, updated } = conversation;
  return (
    <li className={current ? "current" : undefined}>
      <a href={hrefOf({ view: "chat", id })} aria-current={current ? "page" : undefined} title={`${title}\n${new Date(updated).toLocaleString()}`}>
        {place === "server" && <Cloud aria-label="Stored on the server" />}
        <span dir="auto">{title}</span>
      </a>
      <button className="icon small" aria-label={`Rename ${title}`} onClick={onRename}>
        <Pencil />
      </button>
      <button className="icon small" aria-label={`Delete ${title}`} onClick={onDelete}>
        <Trash2 />
      </button>
    </li>
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
