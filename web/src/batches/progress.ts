/** How far a batch is, in numbers and words. */

import type { Batch, Status } from "../api/batches";
import { count, duration } from "../format";

export const STATUS: Record<Status, string> = {
  validating: "The file is checked",
  in_progress: "Running",
  finalizing: "The results are written",
  completed: "Completed",
  failed: "Failed",
  expired: "Expired before all requests were answered",
  cancelling: "Is being cancelled",
  cancelled: "Cancelled",
};

export function isUnfinished({ status }: Batch): boolean {
  return ["validating", "in_progress", "finalizing", "cancelling"].includes(status);
}

/** Its requests that have an answer or an error. */
export function numDone({ request_counts }: Batch): number {
  return request_counts.completed + request_counts.failed;
}

/** Seconds that it will take at the pace so far; undefined where there is none to go by. */
export function secondsLeft(batch: Batch, now: number): number | undefined {
  const done = numDone(batch);
  if (batch.status !== "in_progress" || batch.in_progress_at === null || done === 0) return undefined;
  return ((batch.request_counts.total - done) * Math.max(0, now - batch.in_progress_at)) / done;
}

/** Such as "3 of 10 requests, 1 failed, about 2 min left". */
export function inWords(batch: Batch, now: number): string {
  const { total, failed } = batch.request_counts;
  const parts = total > 0 ? [`${count(numDone(batch))} of ${count(total)} requests`] : [];
  if (failed > 0) parts.push(`${count(failed)} failed`);
  const left = secondsLeft(batch, now);
  if (left !== undefined) parts.push(`about ${duration(left)} left`);
  return parts.join(", ");
}
