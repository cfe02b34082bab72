import "../styles/batches.css";
import { Ban, Download, FileUp, LoaderCircle } from "lucide-react";
import { useRef, useState } from "react";
import { cancelBatch, startBatch, type Batch } from "../api/batches";
import { download } from "../api/history";
import { explain, type Problem } from "../api/problems";
import { saveAs } from "../save";
import { inWords, isUnfinished, numDone, STATUS } from "./progress";
import { useBatches } from "./use-batches";

const AT_A_TIME = 20;
const ERRORS_SHOWN = 5;

/** Files of requests that the server answers in the background: started, followed, cancelled, and their results saved. */
export default function Batches() {
  const [wanted, setWanted] = useState(AT_A_TIME);
  const { batches, hasMore, problem: unknown, refresh } = useBatches(wanted);
  const [failure, setFailure] = useState<Problem>();
  const [starting, setStarting] = useState(false);
  const chooser = useRef<HTMLInputElement>(null);
  const problem = failure ?? unknown;

  async function attempt(work: () => Promise<unknown>): Promise<void> {
    setFailure(undefined);
    try {
      await work();
    } catch (error) {
      setFailure(explain(error));
    }
    refresh();
  }

  async function start(file: File): Promise<void> {
    setStarting(true);
    await attempt(() => startBatch(file));
    setStarting(false);
  }

  return (
    <main id="main" className="view batches" tabIndex={0} aria-busy={!batches && !problem}>
      <h1>Batches</h1>
      <p className="hint">
        A batch is a file of requests, each a line of JSON in the format of OpenAI's batches. The server answers them while nothing
        else needs the engine.
      </p>
      <input
        ref={chooser}
        type="file"
        accept=".jsonl,application/jsonl"
        hidden
        aria-label="File of requests"
        onChange={(event) => {
          const file = event.target.files?.[0];
          event.target.value = "";
          if (file) void start(file);
        }}
      />
      <button className="primary" disabled={starting} onClick={() => chooser.current!.click()}>
        {starting ? <LoaderCircle className="spin" aria-hidden /> : <FileUp aria-hidden />} Start a batch
      </button>
      {problem && (
        <p className="problem" role="alert">
          <strong>{problem.title}.</strong> {problem.detail}
        </p>
      )}
      {batches?.length === 0 && <p className="notice">There is no batch yet.</p>}
      <ul aria-label="Batches">
        {batches?.map((batch) => (
          <Job key={batch.id} batch={batch} attempt={(work) => void attempt(work)} />
        ))}
      </ul>
      {hasMore && <button onClick={() => setWanted(wanted + AT_A_TIME)}>Show older ones</button>}
    </main>
  );
}

function Job({ batch, attempt }: { batch: Batch; attempt: (work: () => Promise<unknown>) => void }) {
  const name = batch.metadata.name ?? batch.id;
  const { total } = batch.request_counts;
  const errors = batch.errors?.data ?? [];
  const stem = name.replace(/\.jsonl$/, "");
  const save = (fileId: string, kind: string) => attempt(async () => saveAs(await download(fileId), `${stem}.${kind}.jsonl`));
  return (
    <li className="panel">
      <h2>{name}</h2>
      <p className="hint">
        {[new Date(1000 * batch.created_at).toLocaleString(), batch.endpoint, batch.model].filter(Boolean).join(" · ")}
      </p>
      {isUnfinished(batch) && (
        <progress aria-label={`Progress of ${name}`} max={total || undefined} value={total ? numDone(batch) : undefined} />
      )}
      <p className={batch.status === "failed" ? "state badly" : "state"}>
        <strong>{STATUS[batch.status]}</strong> {inWords(batch, Date.now() / 1000)}
      </p>
      {errors.length > 0 && (
        <ul className="problem">
          {errors.slice(0, ERRORS_SHOWN).map((error, index) => (
            <li key={index}>
              {error.line !== null && `Line ${error.line}: `}
              {error.message}
            </li>
          ))}
          {errors.length > ERRORS_SHOWN && <li>and {errors.length - ERRORS_SHOWN} more</li>}
        </ul>
      )}
      <div className="buttons">
        {batch.output_file_id && (
          <button onClick={() => save(batch.output_file_id!, "answers")}>
            <Download aria-hidden /> Save answers<span className="visually-hidden"> of {name}</span>
          </button>
        )}
        {batch.error_file_id && (
          <button onClick={() => save(batch.error_file_id!, "errors")}>
            <Download aria-hidden /> Save errors<span className="visually-hidden"> of {name}</span>
          </button>
        )}
        {isUnfinished(batch) && batch.status !== "cancelling" && (
          <button className="danger" onClick={() => attempt(() => cancelBatch(batch.id))}>
            <Ban aria-hidden /> Cancel<span className="visually-hidden"> {name}</span>
          </button>
        )}
      </div>
    </li>
  );
}
