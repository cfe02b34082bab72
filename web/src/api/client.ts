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

/** The data of server-sent events, as JSON. Throws ApiError if the connection breaks. */
export async function* events(response: Response, signal: AbortSignal): AsyncGenerator<unknown> {
  const parsed = response.body!.pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream());
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
