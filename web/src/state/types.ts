/** The parts of a conversation. */

import type { Problem } from "../api/problems";

export interface Attachment {
  id: string;
  name: string;
  kind: "image" | "video" | "document";
  /** Pages of a document to send, like "1-3,7"; all if absent. */
  pages?: string;
  /** Its bytes, where they are in the browser. */
  blob?: Blob;
  /** Its name on the server, where it was uploaded. */
  fileId?: string;
}

/** The model's view of an image. box: the part that it saw, in pixels of the image. */
export interface ImageSize {
  width: number;
  height: number;
  model_width: number | null;
  model_height: number | null;
  box: [number, number, number, number] | null;
}

/** An answer's tokens, and times in seconds. */
export interface Cost {
  promptTokens: number;
  cachedTokens: number;
  answerTokens: number;
  firstToken: number;
  total: number;
}

export type Ending = "complete" | "length" | "stopped" | "failed";

export interface Turn {
  id: string;
  role: "user" | "assistant";
  text: string;
  /** Reasoning before the answer. */
  thoughts?: string;
  attachments: Attachment[];
  /** How an answer ended; none while it comes. */
  ending?: Ending;
  problem?: Problem;
  cost?: Cost;
  /** An answer's views of the conversation's images, in order. */
  imageSizes?: ImageSize[];
  /** The model or adapter chosen for an answer; absent for the server's own. */
  model?: string;
  /** Its name on the server, which keeps it. */
  itemId?: string;
  /** The name of its thoughts there. */
  thoughtsId?: string;
}

export type Place = "browser" | "server";

export interface Conversation {
  /** On the server, its name there. */
  id: string;
  title: string;
  place: Place;
  updated: number;
  turns: Turn[];
  /** Items that the server still has and that are no longer part of it. */
  obsolete?: string[];
}

/** The kind of a file, by its name and MIME type; undefined if no model takes it. */
export function kindOf(name: string, type: string): Attachment["kind"] | undefined {
  if (type === "application/pdf" || type === "image/tiff" || /\.(pdf|tiff?)$/i.test(name)) return "document";
  if (type.startsWith("video/") || /\.(mp4|webm|avi|mov|mkv)$/i.test(name)) return "video";
  if ((type.startsWith("image/") && type !== "image/svg+xml") || /\.(heic|heif|avif)$/i.test(name)) return "image";
  return undefined;
}

export function newId(): string {
  return crypto.getRandomValues(new Uint32Array(4)).reduce((text, number) => text + number.toString(36), "");
}

/** Turns to send to the model, without failed ones. */
export function seen(turns: Turn[]): Turn[] {
  return turns.filter((turn, index) => {
    const answer = turn.role === "assistant" ? turn : turns[index + 1];
    return !answer || answer.role === "user" || answer.text !== "" || answer.ending === undefined;
  });
}
