/** Files of requests that the server answers in the background. All of it throws ApiError. */

import { getJson, request, sendJson } from "./client";

export type Status = "validating" | "in_progress" | "finalizing" | "completed" | "failed" | "expired" | "cancelling" | "cancelled";

/** Times are seconds since 1970. */
export interface Batch {
  id: string;
  endpoint: string;
  model: string | null;
  status: Status;
  errors: { data: { message: string; line: number | null }[] } | null;
  output_file_id: string | null;
  error_file_id: string | null;
  created_at: number;
  in_progress_at: number | null;
  request_counts: { total: number; completed: number; failed: number };
  metadata: Record<string, string>;
}

interface BatchList {
  data: Batch[];
  has_more: boolean;
  last_id: string | null;
}

const PAGE = 100;
const LONGEST_VALUE = 512; // of metadata
const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/responses"];

/** The newest batches, and whether there are others. */
export async function newestBatches(wanted: number, signal?: AbortSignal): Promise<{ batches: Batch[]; hasMore: boolean }> {
  const batches: Batch[] = [];
  for (let after = ""; ; ) {
    const limit = Math.min(wanted - batches.length, PAGE);
    const page = await getJson<BatchList>(`v1/batches?limit=${limit}${after && `&after=${encodeURIComponent(after)}`}`, signal);
    batches.push(...page.data);
    if (!page.has_more || !page.last_id || batches.length >= wanted) return { batches, hasMore: page.has_more };
    after = page.last_id;
  }
}

export async function startBatch(file: File): Promise<Batch> {
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file, file.name);
  const { id }: { id: string } = await (await request("v1/files", { method: "POST", body: form })).json();
  const body = { input_file_id: id, endpoint: await endpointOf(file), metadata: { name: file.name.slice(0, LONGEST_VALUE) } };
  try {
    return await (await sendJson("POST", "v1/batches", body)).json();
  } catch (error) {
    await sendJson("DELETE", `v1/files/${id}`).catch(() => undefined); // the first error says more
    throw error;
  }
}

export async function cancelBatch(id: string): Promise<void> {
  await sendJson("POST", `v1/batches/${encodeURIComponent(id)}/cancel`);
}

/** That of the first request; the server says what is wrong with a file that has none. */
async function endpointOf(file: File): Promise<string> {
  const [line = ""] = (await file.slice(0, 2 ** 20).text()).split("\n", 1);
  return ENDPOINTS.find((endpoint) => line.includes(`"${endpoint}"`)) ?? "/v1/chat/completions";
}
