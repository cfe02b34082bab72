/** Numbers as people read them. */

import type { Wait } from "./api/client";
import type { Cost } from "./state/types";

/** Seconds that an answer must have taken for its speed to be more than chance. */
const MEASURABLE = 0.2;

export function count(value: number): string {
  return Math.round(value).toLocaleString("en-US");
}

/** Such as "1 file" and "3 files". */
export function plural(value: number, noun: string): string {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toPrecision(2)} ms`;
  return value < 9.95 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
}

/** A time that takes a while: seconds, minutes or hours, in whole ones. */
export function duration(value: number): string {
  if (value < 90) return `${Math.ceil(value)} s`;
  const minutes = Math.round(value / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function percent(part: number, whole: number): string {
  if (whole <= 0) return "–";
  const rounded = Math.round((100 * part) / whole);
  return `${part < whole ? Math.min(rounded, 99) : rounded}%`; // all is only what is all
}

export function rate(value: number): string {
  return value > 0 && value < 9.95 ? value.toFixed(1) : count(value);
}

export function bytes(value: number): string {
  return value < 1024 ** 2 ? `${count(value / 1024)} KiB` : `${count(value / 1024 ** 2)} MiB`;
}

/** An answer's tokens and times in one line. */
export function describeCost(cost: Cost): string {
  const cached = cost.cachedTokens ? ` (${count(cost.cachedTokens)} cached)` : "";
  const parts = [`${count(cost.promptTokens)} tokens read${cached}`, `${count(cost.answerTokens)} written`];
  parts.push(`first after ${seconds(cost.firstToken)}`);
  const later = cost.total - cost.firstToken;
  if (later >= MEASURABLE) parts.push(`${rate((cost.answerTokens - 1) / later)} tokens/s`);
  return parts.join(" · ");
}

/** Why an answer waits; undefined: the server has not said. */
export function describeWait(wait: Wait | undefined): string {
  switch (wait?.state) {
    case "sending":
      return wait.sent < wait.total ? `Sending files: ${percent(wait.sent, wait.total)}` : "Waiting";
    case "waiting":
      return wait.place === 1 ? "Next in the queue" : `Number ${wait.place} in the queue`;
    case "images":
      return wait.images === 1 ? "Reading the image" : `Reading ${wait.images} images`;
    case "prompt":
      return `Reading the prompt: ${count(wait.tokens)} of ${count(wait.total)} tokens`;
    case "answer":
      return "Writing";
    default:
      return "Waiting";
  }
}

/** Bytes in decimal megabytes, as limits are told; small sizes in kilobytes. */
export function megabytes(size: number): string {
  return size < 1e5 ? `${Math.ceil(size / 1e3)} kB` : `${(size / 1e6).toFixed(1)} MB`;
}
