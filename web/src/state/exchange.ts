/** Conversations in a file, for a backup or another browser. */

import { bytesOf } from "../api/history";
import { blobOf, dataUrl } from "./data-url";
import { newId, type Attachment, type Conversation, type Ending, type ImageSize, type Turn } from "./types";

const FORMAT = "vlmserve-conversations";
const VERSION = 1;
const KINDS: Attachment["kind"][] = ["image", "video", "document"];
const ENDINGS: Ending[] = ["complete", "length", "stopped", "failed"];
const NAME = /^[\w-]{1,100}$/;
const FOREIGN = "This is not a file of conversations that vlmserve has exported";

interface Stored extends Omit<Attachment, "blob" | "fileId"> {
  data?: string;
}

/** Write conversations with their files. Throws ApiError for files that only the server has. */
export async function exported(conversations: readonly Conversation[]): Promise<Blob> {
  const parts: Blob[] = [];
  for (const { id, title, updated, turns } of conversations) {
    const stored = await Promise.all(turns.map(storedTurn));
    parts.push(new Blob([parts.length ? ",\n" : "", JSON.stringify({ id, title, updated, turns: stored })]));
  }
  const head = `{"format": "${FORMAT}", "version": ${VERSION}, "conversations": [\n`;
  return new Blob([head, ...parts, "\n]}\n"], { type: "application/json" });
}

/** Read conversations of a file, as this browser's own. Throws an error that says what is wrong with the file. */
export function conversationsIn(text: string): Conversation[] {
  let file: { format?: unknown; version?: unknown; conversations?: unknown };
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error(FOREIGN);
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw new Error(FOREIGN);
  if (file.version !== VERSION) throw new Error(`The file has version ${file.version}; this page reads version ${VERSION}`);
  return file.conversations.map((one, index) => {
    try {
      return conversationOf(one);
    } catch (error) {
      throw new Error(`Conversation ${index + 1} cannot be read: ${error instanceof Error ? error.message : error}`);
    }
  });
}

async function storedTurn({ itemId: _, thoughtsId: __, attachments, ...turn }: Turn): Promise<object> {
  return { ...turn, attachments: await Promise.all(attachments.map(storedAttachment)) };
}

async function storedAttachment({ id, name, kind, pages, ...attachment }: Attachment): Promise<Stored> {
  return { id, name, kind, pages, data: await dataUrl(await bytesOf({ id, name, kind, ...attachment })) };
}

function conversationOf(one: Partial<Conversation>): Conversation {
  const { id, title, updated, turns } = one;
  if (typeof id !== "string" || !NAME.test(id)) throw new Error("it has no id");
  if (typeof title !== "string" || typeof updated !== "number" || !Array.isArray(turns)) throw new Error("it lacks a title, a date or turns");
  return { id, title, updated, place: "browser", turns: turns.map(turnOf) };
}

function turnOf(turn: Partial<Turn>): Turn {
  const { role, text, attachments, ending } = turn;
  if ((role !== "user" && role !== "assistant") || typeof text !== "string" || !Array.isArray(attachments)) {
    throw new Error("a turn lacks a role, a text or attachments");
  }
  return {
    id: newId(),
    role,
    text,
    attachments: attachments.map((one: Stored) => attachmentOf(one)),
    thoughts: typeof turn.thoughts === "string" ? turn.thoughts : undefined,
    ending: role === "user" ? undefined : ENDINGS.find((known) => known === ending) ?? "stopped",
    model: typeof turn.model === "string" ? turn.model : undefined,
    cost: numbers(turn.cost, ["promptTokens", "cachedTokens", "answerTokens", "firstToken", "total"]) ? turn.cost : undefined,
    imageSizes: Array.isArray(turn.imageSizes) && turn.imageSizes.every(isSize) ? turn.imageSizes : undefined,
  };
}

function isSize(size: unknown): boolean {
  const { model_width, box } = (size ?? {}) as Partial<ImageSize>;
  if (!numbers(size, ["width", "height"]) || (model_width !== null && !numbers(size, ["model_width", "model_height"]))) return false;
  return box === null || (Array.isArray(box) && numbers(box, [0, 1, 2, 3]));
}

/** True if these members of a value are numbers. */
function numbers(value: unknown, names: (string | number)[]): boolean {
  return names.every((name) => Number.isFinite((value as Record<string | number, unknown> | undefined)?.[name]));
}

function attachmentOf({ name, kind, pages, data }: Partial<Stored>): Attachment {
  if (typeof name !== "string" || typeof data !== "string" || !KINDS.includes(kind!)) throw new Error("a file lacks a name, a kind or data");
  return { id: newId(), name, kind: kind!, pages: typeof pages === "string" ? pages : undefined, blob: blobOf(data) };
}
