import "../styles/batches.css";
import { Ban, Download, FileUp, LoaderCircle, ScrollText } from "lucide-react";
import { useRef, useState } from "react";
import { cancelBatch, startBatch, type Batch } from "../api/batches";
import { download } from "../api/history";
import { explain, type Problem } from "../api/problems";
import type { Model } from "../api/server";
import { saveAs } from "../save";
import { AskMany } from "./ask-many";
import { inWords, isUnfinished, numDone, STATUS } from "./progress";
import { sampleRequests } from "./questions";
import { ResultsDialog } from "./results-dialog";
import { useBatches } from "./use-batches";

const AT_A_TIME = 20;
const ERRORS_SHOWN = 5;

/** Requests that the server answers in the background: started, followed, cancelled, and their answers read. */
export default function Batches({ model }: { model?: Model }) {
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
        The server answers a batch of requests while nothing else needs the engine.
      </p>
      <AskMany model={model} attempt={attempt} />
      <section className="panel">
        <h2>Send a file of requests</h2>
        <p className="hint">Each line is a request in the format of OpenAI's batches.</p>
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
        <div className="buttons">
          <button disabled={starting} onClick={() => chooser.current!.click()}>
            {starting ? <LoaderCircle className="spin" aria-hidden /> : <FileUp aria-hidden />} Start a batch
          </button>
          <button className="quiet" onClick={() => saveAs(new Blob([sampleRequests(model?.id ?? "pixie")]), "sample.jsonl")}>
            <Download aria-hidden /> Save a sample file
          </button>
        </div>
      </section>
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
  const [reading, setReading] = useState(false);
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
        {!isUnfinished(batch) && (batch.output_file_id || batch.error_file_id) && (
          <button onClick={() => setReading(true)}>
            <ScrollText aria-hidden /> Read answers<span className="visually-hidden"> of {name}</span>
          </button>
        )}
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
      {reading && <ResultsDialog batch={batch} name={stem} onClose={() => setReading(false)} />}
    </li>
  );
}
