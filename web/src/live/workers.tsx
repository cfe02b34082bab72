import { count, percent, rate } from "../format";
import type { Figures, History } from "./figures";

interface Props {
  workers: Record<string, Figures>;
  history: History;
  /** The worker whose figures the view shows; "" for all together. */
  chosen: string;
  onChoose: (name: string) => void;
}

/** A cluster's workers. The user can choose one to see only its figures. */
export function Workers({ workers, history, chosen, onChoose }: Props) {
  const names = Object.keys(workers).sort();
  return (
    <section className="panel workers">
      <h2 id="workers">{names.length === 1 ? "1 worker" : `${count(names.length)} workers`}</h2>
      <div className="scrolls" tabIndex={0} role="region" aria-labelledby="workers">
        <table aria-labelledby="workers">
          <thead>
            <tr>
              <th scope="col">Worker</th>
              <th scope="col">Model</th>
              <th scope="col">Status</th>
              <th scope="col">Running</th>
              <th scope="col">Waiting</th>
              <th scope="col">Tokens/s</th>
              <th scope="col">KV cache</th>
              <th scope="col">Prefix hits</th>
              <th scope="col">Encoder hits</th>
            </tr>
          </thead>
          <tbody>
            {names.map((name) => {
              const { engine, model, status } = workers[name]!;
              const generated = history[name]?.at(-1)?.generation;
              return (
                <tr key={name} aria-current={name === chosen || undefined}>
                  <th scope="row">
                    <button className="quiet" aria-pressed={name === chosen} onClick={() => onChoose(name === chosen ? "" : name)}>
                      {name}
                    </button>
                  </th>
                  <td>{model}</td>
                  <td>{status}</td>
                  <td>{engine ? count(engine.num_running) : "–"}</td>
                  <td>{engine ? count(engine.num_waiting) : "–"}</td>
                  <td>{generated == null ? "–" : rate(generated)}</td>
                  <td>{engine ? percent(engine.kv_blocks_used, engine.kv_blocks_total) : "–"}</td>
                  <td>{engine ? percent(engine.prefix_cached_tokens, engine.prefix_queried_tokens) : "–"}</td>
                  <td>{engine ? percent(engine.encoder_hits, engine.encoder_queries) : "–"}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      <p className="hint">{chosen ? `All other figures are about ${chosen}.` : "Choose one to see its figures alone."}</p>
    </section>
  );
}
