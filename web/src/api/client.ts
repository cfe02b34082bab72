/** Requests to the server that this page came from, wherever a proxy may have put it. */

import { EventSourceParserStream } from "eventsource-parser/stream";

export class ApiError extends Error {
  constructor(
    /** The HTTP status; 0 where there was no answer at all. */
    readonly status: number,
    readonly code: string,
    message: string,
    /** Seconds after which it may be tried again, if the server says so. */
    readonly retryAfter?: number,
  ) {
    super(message);
  }
}

let key = "";

export function useKey(value: string): void {
  key = value.trim();
}

/** The response, if it is a good one. Throws ApiError, and what `fetch` throws when `signal` aborts it. */
export async function request(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response: Response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...init, headers });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiError(0, "unreachable", "The server cannot be reached");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await request(path, { signal })).json();
}

export function sendJson(method: string, path: string, body?: unknown, signal?: AbortSignal, headers: HeadersInit = {}): Promise<Response> {
  const content = body === undefined ? {} : { body: JSON.stringify(body), headers: { ...headers, "Content-Type": "application/json" } };
  return request(path, { method, signal, ...content });
}

/** A POST of files. onSent gets the bytes that were sent so far, which `fetch` does not tell. */
export function sendForm(path: string, form: FormData, signal: AbortSignal, onSent: (bytes: number) => void): Promise<Response> {
  return new Promise((resolve, reject) => {
    const sending = new XMLHttpRequest();
    sending.open("POST", new URL(path, document.baseURI));
    if (key) sending.setRequestHeader("Authorization", `Bearer ${key}`);
    sending.responseType = "blob";
    sending.upload.onprogress = (event) => onSent(event.loaded);
    sending.onload = () => {
      const headers = { "Retry-After": sending.getResponseHeader("Retry-After") ?? "" };
      const response = new Response(sending.response, { status: sending.status, statusText: sending.statusText, headers });
      if (response.ok) resolve(response);
      else failure(response).then(reject);
    };
    sending.onerror = () => reject(new ApiError(0, "unreachable", "The server cannot be reached"));
    sending.onabort = () => reject(signal.reason);
    signal.addEventListener("abort", () => sending.abort());
    if (signal.aborted) reject(signal.reason);
    else sending.send(form);
  });
}

/** Why the first token of an answer is not here yet. */
export type Wait =
  | { state: "waiting"; place: number }
  | { state: "images"; images: number }
  | { state: "prompt"; tokens: number; total: number }
  | { state: "answer" };

/** A POST whose stream has comments about what the first token waits for. */
export function sendForStream(path: string, body: unknown, signal: AbortSignal): Promise<Response> {
  return sendJson("POST", path, body, signal, { "X-Stream-Progress": "1" });
}

/** The data of server-sent events, as JSON. onWait gets what is in comments. Throws ApiError if the connection breaks. */
export async function* events(response: Response, signal: AbortSignal, onWait: (wait: Wait) => void): AsyncGenerator<unknown> {
  const onComment = (comment: string) => comment.trimStart().startsWith("{") && onWait(JSON.parse(comment));
  const parsed = response.body!.pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream({ onComment }));
  const reader = parsed.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      if (value.data !== "[DONE]") yield JSON.parse(value.data);
    }
  } catch (error) {
    if (signal.aborted) throw error;
    throw brokenOff();
  } finally {
    reader.cancel().catch(() => undefined); // the connection is gone already
  }
}

export function brokenOff(): ApiError {
  return new ApiError(0, "broken_off", "The connection ended before the answer was complete");
}

async function failure(response: Response): Promise<ApiError> {
  let message = response.statusText || `Status ${response.status}`;
  let code = "";
  try {
    const body = await response.json();
    message = body.error?.message ?? body.reason ?? message;
    code = body.error?.code ?? "";
  } catch {
    message = `A ${response.status} came back that is not from this server: ${message}`; // a proxy's own page
  }
  const wait = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  return new ApiError(response.status, code, message, Number.isFinite(wait) ? wait : undefined);
}
