import { FileSpreadsheet } from "lucide-react";
import { useEffect, useState } from "react";
import { readBatch, type Batch } from "../api/batches";
import { explain, type Problem } from "../api/problems";
import { Attachments } from "../chat/attachments";
import { Dialog } from "../chat/dialog";
import { Markdown } from "../chat/markdown";
import { count } from "../format";
import { saveAs } from "../save";
import { asCsv, resultsOf, type Result } from "./results";

const AT_A_TIME = 20;

/** The answers of a batch beside the images that they are about. name: for a file of them. */
export function ResultsDialog({ batch, name, onClose }: { batch: Batch; name: string; onClose: () => void }) {
  const [results, setResults] = useState<Result[]>();
  const [problem, setProblem] = useState<Problem>();
  const [shown, setShown] = useState(AT_A_TIME);
  useEffect(() => {
    readBatch(batch).then(
      (files) => setResults(resultsOf(files)),
      (error) => setProblem(explain(error)),
    );
  }, [batch.id]);
  return (
    <Dialog title={name} wide onClose={onClose}>
      {problem && (
        <p className="problem" role="alert">
          <strong>{problem.title}.</strong> {problem.detail}
        </p>
      )}
      <ol className="results" aria-label="Answers" aria-busy={!results && !problem}>
        {results?.slice(0, shown).map((result) => (
          <li key={result.id}>
            {result.file && <Attachments attachments={[result.file]} />}
            <div>
              <h3 dir="auto">{result.id}</h3>
              {result.answer !== undefined && <Markdown text={result.answer} />}
              {result.error !== undefined && <p className="problem">{result.error}</p>}
            </div>
          </li>
        ))}
      </ol>
      {results && (
        <div className="buttons">
          {results.length > shown && <button onClick={() => setShown(shown + AT_A_TIME)}>Show more of {count(results.length)}</button>}
          <button onClick={() => saveAs(new Blob([asCsv(results)], { type: "text/csv" }), `${name}.csv`)}>
            <FileSpreadsheet aria-hidden /> Save as CSV
          </button>
        </div>
      )}
    </Dialog>
  );
}
