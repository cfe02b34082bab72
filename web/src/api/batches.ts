/** Files of requests that the server answers in the background. All of it throws ApiError. */

import type { Attachment } from "../state/types";
import { ApiError, getJson, request, sendJson } from "./client";
import { deleteFiles, download, upload } from "./history";

export type Status = "validating" | "in_progress" | "finalizing" | "completed" | "failed" | "expired" | "cancelling" | "cancelled";

/** Times are seconds since 1970. */
export interface Batch {
  id: string;
  endpoint: string;
  model: string | null;
  status: Status;
  errors: { data: { message: string; line: number | null }[] } | null;
  input_file_id: string;
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
const LARGEST_INPUT = 16_000_000; // bytes; larger files hold images themselves
const UPLOADS = 4;
const MONTH = 30 * 86_400; // in seconds
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

export interface Rejected {
  name: string;
  reason: string;
}

/** Upload files and start a batch with a request about each; returns the files that the server rejected. onSent gets the
 * number of sent files. */
export async function startBatchAbout(
  attachments: readonly Attachment[],
  name: string,
  write: (uploaded: Attachment[]) => string,
  signal: AbortSignal,
  onSent: (files: number) => void,
): Promise<Rejected[]> {
  const fileIds: (string | undefined)[] = [];
  const rejected: Rejected[] = [];
  let next = 0;
  let sent = 0;
  async function work(): Promise<void> {
    while (next < attachments.length) {
      const index = next++;
      const attachment = attachments[index]!;
      try {
        fileIds[index] = await upload(attachment, signal, () => undefined, MONTH);
      } catch (error) {
        if (!(error instanceof ApiError && error.status === 400)) throw error;
        rejected.push({ name: attachment.name, reason: error.message });
      }
      onSent(++sent);
    }
  }
  try {
    await Promise.all(Array.from({ length: UPLOADS }, work));
    const uploaded = attachments.map((attachment, index) => ({ ...attachment, fileId: fileIds[index] }));
    const accepted = uploaded.filter(({ fileId }) => fileId);
    if (accepted.length > 0) await startBatch(new File([write(accepted)], `${name}.jsonl`, { type: "application/jsonl" }));
    return rejected;
  } catch (error) {
    next = attachments.length;
    await deleteFiles(fileIds.filter((fileId) => fileId !== undefined));
    throw error;
  }
}

/** The texts of a batch's files. input: empty if the file is large or gone. */
export async function readBatch(batch: Batch): Promise<{ input: string; output: string; errors: string }> {
  const read = async (id: string | null) => (id ? (await download(id)).text() : "");
  const [input, output, errors] = await Promise.all([
    getJson<{ bytes: number }>(`v1/files/${batch.input_file_id}`)
      .then(({ bytes }) => read(bytes <= LARGEST_INPUT ? batch.input_file_id : null))
      .catch(() => ""), // answers are shown without their images
    read(batch.output_file_id),
    read(batch.error_file_id),
  ]);
  return { input, output, errors };
}

export async function cancelBatch(id: string): Promise<void> {
  await sendJson("POST", `v1/batches/${encodeURIComponent(id)}/cancel`);
}

/** The first request's path; the server rejects a file without one. */
async function endpointOf(file: File): Promise<string> {
  const [line = ""] = (await file.slice(0, 2 ** 20).text()).split("\n", 1);
  return ENDPOINTS.find((endpoint) => line.includes(`"${endpoint}"`)) ?? "/v1/chat/completions";
}
