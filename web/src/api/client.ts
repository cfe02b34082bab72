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

export function sendJson(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
  const content = body === undefined ? {} : { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  return request(path, { method, signal, ...content });
}

/** A POST of files. onSent gets the bytes that were sent so far. */
export function sendForm(path: string, form: FormData, signal: AbortSignal, onSent: (bytes: number) => void): Promise<Response> {
  return post(path, form, {}, signal, onSent);
}

/** Like `request`, but onSent gets the bytes that were sent so far, and the body's. `fetch` does not tell them. */
function post(
  path: string,
  body: string | FormData,
  headers: Record<string, string>,
  signal: AbortSignal,
  onSent: (bytes: number, total: number) => void,
): Promise<Response> {
  return new Promise((resolve, reject) => {
    const sending = new XMLHttpRequest();
    const encoder = new TextEncoder();
    let output: ReadableStreamDefaultController<Uint8Array>;
    let read = 0;
    const content = new ReadableStream<Uint8Array>({ start: (controller) => void (output = controller), cancel: () => sending.abort() });
    const forward = () => {
      const text = sending.responseText.slice(read);
      read += text.length;
      if (text) output.enqueue(encoder.encode(text));
    };
    const fail = (error: unknown) => {
      reject(error);
      output.error(error);
    };
    sending.open("POST", new URL(path, document.baseURI));
    for (const [name, value] of Object.entries(key ? { ...headers, Authorization: `Bearer ${key}` } : headers)) {
      sending.setRequestHeader(name, value);
    }
    sending.upload.onprogress = (event) => onSent(event.loaded, event.total);
    sending.onreadystatechange = () => {
      if (sending.readyState !== XMLHttpRequest.HEADERS_RECEIVED || sending.status === 0) return;
      // `Response` rejects these statuses with a body; the server never sends them here, but a proxy may.
      if ([204, 205, 304].includes(sending.status)) return reject(brokenOff());
      const retryAfter = { "Retry-After": sending.getResponseHeader("Retry-After") ?? "" };
      const response = new Response(content, { status: sending.status, statusText: sending.statusText, headers: retryAfter });
      if (response.ok) resolve(response);
      else failure(response).then(reject);
    };
    sending.onprogress = forward;
    sending.onload = () => {
      forward();
      output.close();
    };
    sending.onerror = () => fail(new ApiError(0, "unreachable", "The server cannot be reached"));
    sending.onabort = () => fail(signal.reason);
    signal.addEventListener("abort", () => sending.abort());
    if (signal.aborted) reject(signal.reason);
    else sending.send(body);
  });
}

/** Why the first token of an answer is not here yet. */
export type Wait =
  | { state: "sending"; sent: number; total: number }
  | { state: "waiting"; place: number }
  | { state: "images"; images: number }
  | { state: "prompt"; tokens: number; total: number }
  | { state: "answer" };

/** A POST whose answer is a stream. onWait is told how much of the request was sent; see `events` for what follows. */
export function sendForStream(path: string, body: unknown, signal: AbortSignal, onWait: (wait: Wait) => void): Promise<Response> {
  const headers = { "Content-Type": "application/json", "X-Stream-Progress": "1" };
  return post(path, JSON.stringify(body), headers, signal, (sent, total) => onWait({ state: "sending", sent, total }));
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
