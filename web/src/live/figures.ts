/** Answers of /live, and rates computed from two of them. */
import { count } from "../format";

export interface Percentiles {
  count: number;
  p50: number | null;
  p90: number | null;
  p99: number | null;
}

export interface Engine {
  num_running: number;
  num_waiting: number;
  kv_blocks_total: number;
  kv_blocks_used: number;
  kv_blocks_cached: number;
  kv_evictions: number;
  prompt_tokens: number;
  generation_tokens: number;
  preemptions: number;
  images_encoded: number;
  steps: number;
  prefix_queried_tokens: number;
  prefix_cached_tokens: number;
  prefix_never_seen_tokens: number;
  prefix_evicted_tokens: number;
  prefix_unsaved_tokens: number;
  host_blocks_total: number;
  host_blocks_used: number;
  encoder_queries: number;
  encoder_hits: number;
  encoder_cache_bytes: number;
  encoder_cache_used_bytes: number;
}

export interface Blocks {
  num_blocks: number;
  blocks_per_cell: number;
  held: number[];
  cached: number[];
  holders: number[];
}

export type Latency = "ttft" | "tpot" | "e2e";

export interface Figures {
  time: number;
  status: "asleep" | "loading" | "serving" | "restarting" | "closing" | "dead";
  model: string;
  engine: Engine | null;
  image_cache: { hits: number; misses: number; num_images: number; used_bytes: number; capacity_bytes: number } | null;
  blocks: Blocks | null;
  latencies: Record<Latency, Record<"60" | "300", Percentiles>>;
  /** The figures of a cluster's workers, by name. */
  workers?: Record<string, Figures>;
}

/** Why prompt tokens were not found in the prefix cache. */
export function missesInWords(engine: Engine): string {
  const reasons: [number, string][] = [
    [engine.prefix_never_seen_tokens, "never seen"],
    [engine.prefix_evicted_tokens, "evicted"],
    [engine.prefix_unsaved_tokens, "without a checkpoint"],
  ];
  const told = reasons.filter(([tokens]) => tokens > 0).map(([tokens, reason]) => `${count(tokens)} ${reason}`);
  return told.join(" · ") || "none";
}

/** A point of the charts: the difference of two answers. */
export interface Sample {
  /** The server's clock, in seconds. */
  time: number;
  running: number | null;
  waiting: number | null;
  prompt: number | null;
  generation: number | null;
}

/** Seconds that the charts show. */
export const SPAN = 300;

export function sampleOf(before: Figures | undefined, now: Figures): Sample {
  const { engine, time } = now;
  const then = before?.engine;
  // An engine that was restarted has begun to count again.
  const known = engine && then && engine.steps >= then.steps && time > before.time;
  const perSecond = (field: "prompt_tokens" | "generation_tokens") =>
    known ? (engine[field] - then[field]) / (time - before.time) : null;
  return {
    time,
    running: engine?.num_running ?? null,
    waiting: engine?.num_waiting ?? null,
    prompt: perSecond("prompt_tokens"),
    generation: perSecond("generation_tokens"),
  };
}

/** The samples of all together, which have the name "", and of each worker, with one more each. */
export type History = Readonly<Record<string, readonly Sample[]>>;

export function withSamples(history: History, before: Figures | undefined, now: Figures): History {
  const named: [string, Figures][] = [["", now], ...Object.entries(now.workers ?? {})];
  const added = named.map(([name, figures]) => {
    const then = name ? before?.workers?.[name] : before;
    return [name, withSample(history[name] ?? [], sampleOf(then, figures))] as const;
  });
  return Object.fromEntries(added);
}

/** Samples of the time that charts show, with one more. */
export function withSample(samples: readonly Sample[], sample: Sample): readonly Sample[] {
  return [...samples.filter((one) => one.time > sample.time - SPAN), sample];
}
