import "../styles/live.css";
import { useMemo, useState } from "react";
import { bytes, count, percent, rate, seconds } from "../format";
import { BlockMap } from "./block-map";
import { Chart } from "./chart";
import { missesInWords, type Engine, type Figures, type Latency } from "./figures";
import { useFigures } from "./use-figures";
import { Workers } from "./workers";

const LATENCIES: Record<Latency, string> = {
  ttft: "First token",
  tpot: "Further token",
  e2e: "Whole answer",
};

const STATUS: Record<Figures["status"], string> = {
  asleep: "The model is loaded with the first request.",
  loading: "The model is loading.",
  serving: "",
  restarting: "The engine is being restarted.",
  closing: "The server is shutting down.",
  dead: "The engine has crashed. The server's log has the reason.",
};

const TOKENS = [
  { field: "generation", label: "generated", colour: "series-1" },
  { field: "prompt", label: "read", colour: "series-2" },
] as const;
const REQUESTS = [
  { field: "running", label: "running", colour: "series-1" },
  { field: "waiting", label: "waiting", colour: "series-2" },
] as const;

/** The engine's state, and the last minutes. */
export default function Live() {
  const { figures: all, history, problem } = useFigures();
  const [worker, setWorker] = useState("");
  const chosen = all?.workers?.[worker] ? worker : ""; // it may have left
  const figures = all?.workers?.[chosen] ?? all;
  const samples = history[chosen] ?? [];
  const latest = samples.at(-1);
  const tokens = useMemo(() => [...TOKENS], []);
  const requests = useMemo(() => [...REQUESTS], []);
  const engine = figures?.engine;
  return (
    <main id="main" className="view live" tabIndex={0} aria-busy={!figures && !problem}>
      <h1>{all?.workers ? (chosen ? `Worker ${chosen}, live` : "The cluster, live") : "The engine, live"}</h1>
      {problem && (
        <p className="problem" role="alert">
          <strong>{problem.title}.</strong> {problem.detail} {figures && "The values shown are older."}
        </p>
      )}
      {figures && STATUS[figures.status] && (
        <p className="notice" role="status">
          {STATUS[figures.status]}
        </p>
      )}
      {figures && (
        <>
          {all?.workers && <Workers workers={all.workers} history={history} chosen={chosen} onChoose={setWorker} />}
          <dl className="tiles">
            <Tile name="Running" value={engine && count(engine.num_running)} detail="requests in the batch" />
            <Tile name="Waiting" value={engine && count(engine.num_waiting)} detail="for their turn" />
            <Tile name="Generated" value={latest?.generation != null ? rate(latest.generation) : null} detail="tokens/s" />
            <Tile name="Read" value={latest?.prompt != null ? rate(latest.prompt) : null} detail="prompt tokens/s" />
          </dl>
          <div className="columns">
            <Chart title="Tokens per second" lines={tokens} samples={samples} format={rate} />
            <Chart title="Requests" lines={requests} samples={samples} format={count} />
          </div>
          <BlockMap blocks={figures.blocks} />
          <div className="columns">
            <Latencies latencies={figures.latencies} />
            <HitRates engine={engine} imageCache={figures.image_cache} />
          </div>
        </>
      )}
    </main>
  );
}

function Tile({ name, value, detail }: { name: string; value?: string | null; detail: string }) {
  return (
    <div className="panel">
      <dt>{name}</dt>
      <dd>
        <b>{value ?? "–"}</b> {detail}
      </dd>
    </div>
  );
}

function Latencies({ latencies }: { latencies: Figures["latencies"] }) {
  return (
    <section className="panel">
      <h2 id="latencies">Latency</h2>
      <div className="scrolls" tabIndex={0} role="region" aria-labelledby="latencies">
        <table aria-labelledby="latencies">
          <thead>
            <tr>
              <th scope="col">Percentile</th>
              <th scope="col">50</th>
              <th scope="col">90</th>
              <th scope="col">99</th>
              <th scope="col">count</th>
            </tr>
          </thead>
          {(["60", "300"] as const).map((window) => (
            <tbody key={window}>
              <tr>
                <th scope="rowgroup" colSpan={5}>
                  {window === "60" ? "Last minute" : "Last 5 minutes"}
                </th>
              </tr>
              {(Object.keys(LATENCIES) as Latency[]).map((kind) => {
                const { p50, p90, p99, count: answers } = latencies[kind][window];
                return (
                  <tr key={kind}>
                    <th scope="row">{LATENCIES[kind]}</th>
                    <td>{seconds(p50)}</td>
                    <td>{seconds(p90)}</td>
                    <td>{seconds(p99)}</td>
                    <td>{count(answers)}</td>
                  </tr>
                );
              })}
            </tbody>
          ))}
        </table>
      </div>
    </section>
  );
}

function HitRates({ engine, imageCache }: { engine?: Engine | null; imageCache: Figures["image_cache"] }) {
  const rows: [name: string, hits: number, all: number, of: string][] = [];
  if (engine) {
    rows.push(["Prefix cache", engine.prefix_cached_tokens, engine.prefix_queried_tokens, "prompt tokens found"]);
    rows.push(["Encoder cache", engine.encoder_hits, engine.encoder_queries, "images already encoded"]);
  }
  if (imageCache) rows.push(["Image cache", imageCache.hits, imageCache.hits + imageCache.misses, "images already prepared"]);
  return (
    <section className="panel">
      <h2>Found in caches</h2>
      <p className="hint">Since the engine was started.</p>
      <dl className="rates">
        {rows.map(([name, hits, all, of]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>
              <b>{percent(hits, all)}</b>
              <span className="hint">
                {count(hits)} of {count(all)} {of}
              </span>
              <meter min={0} max={1} value={all ? hits / all : 0} aria-label={`${name}: ${percent(hits, all)}`} />
            </dd>
          </div>
        ))}
        {engine && (
          <div>
            <dt>Prompt tokens not found</dt>
            <dd>
              <b>{count(engine.prefix_never_seen_tokens + engine.prefix_evicted_tokens + engine.prefix_unsaved_tokens)}</b>
              <span className="hint">{missesInWords(engine)}</span>
            </dd>
          </div>
        )}
        {engine && (
          <div>
            <dt>Encoder cache in use</dt>
            <dd>
              <b>{bytes(engine.encoder_cache_used_bytes)}</b>
              <span className="hint">of {bytes(engine.encoder_cache_bytes)}</span>
            </dd>
          </div>
        )}
        {engine && (
          <div>
            <dt>Preempted, evicted</dt>
            <dd>
              <b>
                {count(engine.preemptions)}, {count(engine.kv_evictions)}
              </b>
              <span className="hint">requests, blocks</span>
            </dd>
          </div>
        )}
      </dl>
    </section>
  );
}
