/** Turns errors into messages for the user. */

import { ApiError } from "./client";

export interface Problem {
  title: string;
  detail: string;
  /** A remedy besides trying again. */
  remedy?: "key" | "shorten";
}

export function explain(error: unknown): Problem {
  if (!(error instanceof ApiError)) {
    return { title: "Something went wrong on this page", detail: error instanceof Error ? error.message : String(error) };
  }
  const detail = error.message;
  switch (error.status) {
    case 0:
      return error.code === "broken_off"
        ? { title: "The answer was interrupted", detail: "The connection to the server was lost. The text so far is above." }
        : { title: "The server cannot be reached", detail: "Is it still running, and are you online? Nothing is lost: try again." };
    case 401:
      return { title: "This server needs a key", detail, remedy: "key" };
    case 403:
      return { title: "This key does not allow that", detail, remedy: "key" };
    case 413:
      return { title: "That is too large for this server", detail: `${detail}. Use fewer or smaller images.`, remedy: "shorten" };
    case 429: {
      const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
      return { title: "The server is overloaded", detail: `${detail}.${wait}` };
    }
    case 503:
      return { title: "The server is not ready", detail };
    case 507:
      return { title: "The server cannot store more conversations", detail };
  }
  if (error.code === "context_length_exceeded") {
    return { title: "This conversation is too long for the model", detail, remedy: "shorten" };
  }
  if (error.status >= 500 || error.code === "generation_failed" || error.code === "engine_dead") {
    return { title: "The server failed", detail };
  }
  return { title: "The server rejected the request", detail };
}
