import { Download, FileUp } from "lucide-react";
import { useRef, useState } from "react";
import { explain, type Problem } from "../api/problems";
import { plural } from "../format";
import { saveAs } from "../save";
import { conversationsIn, exported } from "../state/exchange";
import { add, find, load, useSession } from "../state/session";
import { Dialog } from "./dialog";

/** Saves conversations in a file, and reads such a file. current: the id of the one that is shown. */
export function ExchangeDialog({ current, onClose }: { current?: string; onClose: () => void }) {
  const { conversations } = useSession();
  const [problem, setProblem] = useState<Problem>();
  const [told, setTold] = useState("");
  const [busy, setBusy] = useState(false);
  const chooser = useRef<HTMLInputElement>(null);
  const shown = current === undefined ? undefined : find(current);

  async function attempt(work: () => Promise<void>): Promise<void> {
    setBusy(true);
    setProblem(undefined);
    setTold("");
    await work().catch((error) => setProblem(explain(error)));
    setBusy(false);
  }

  async function write(ids: readonly string[], name: string): Promise<void> {
    for (const id of ids) await load(id);
    saveAs(await exported(ids.map((id) => find(id)!)), `${name}.json`);
    setTold(`${plural(ids.length, "conversation")} saved.`);
  }

  async function read(file: File): Promise<void> {
    let found;
    try {
      found = conversationsIn(await file.text());
    } catch (error) {
      return setProblem({ title: `${file.name} cannot be imported`, detail: `${(error as Error).message}.` });
    }
    const added = await add(found);
    const known = found.length - added;
    setTold(`${plural(added, "conversation")} added${known > 0 ? `, ${known} here already` : ""}.`);
  }

  const today = new Date().toISOString().slice(0, 10);
  return (
    <Dialog title="Export and import" onClose={onClose}>
      {problem && (
        <p className="problem" role="alert">
          <strong>{problem.title}.</strong> {problem.detail}
        </p>
      )}
      <p>
        A file holds questions, answers and images, for a backup or another browser. Imported conversations are stored in this browser.
      </p>
      <p role="status">{told}</p>
      <input
        ref={chooser}
        type="file"
        accept=".json,application/json"
        hidden
        aria-label="File of conversations"
        onChange={(event) => {
          const file = event.target.files?.[0];
          event.target.value = "";
          if (file) void attempt(() => read(file));
        }}
      />
      <div className="buttons">
        {shown && (
          <button disabled={busy} onClick={() => void attempt(() => write([shown.id], shown.title.replace(/[^\p{L}\p{N}]+/gu, "-")))}>
            <Download aria-hidden /> Export this one
          </button>
        )}
        <button
          disabled={busy || conversations.length === 0}
          onClick={() => void attempt(() => write(conversations.map(({ id }) => id), `conversations-${today}`))}
        >
          <Download aria-hidden /> Export all ({conversations.length})
        </button>
        <button disabled={busy} onClick={() => chooser.current!.click()}>
          <FileUp aria-hidden /> Import
        </button>
      </div>
    </Dialog>
  );
}
