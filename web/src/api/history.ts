/** Conversations and images that the server keeps. All of it throws ApiError. */

import { kindOf, type Attachment, type Turn } from "../state/types";
import { inputParts } from "./answers";
import { ApiError, getJson, request, sendForm, sendJson } from "./client";

interface Part {
  type: string;
  text?: string;
  file_id?: string;
  pages?: string;
}

interface Item {
  id: string;
  type: string;
  /** The message's id. */
  role?: "user" | "assistant" | "system" | "developer";
  content: Part[];
}

interface ItemList {
  data: Item[];
  has_more: boolean;
  last_id: string | null;
}

/** The server's ids of a question's and its answer's items. */
export interface ItemNames {
  question?: string;
  thoughts?: string;
  answer?: string;
}

/** True if the server stores conversations. */
export async function keepsHistory(): Promise<boolean> {
  try {
    await getJson("v1/files?limit=1");
    return true;
  } catch {
    return false;
  }
}

export async function createConversation(title: string): Promise<string> {
  return (await (await sendJson("POST", "v1/conversations", { metadata: { title } })).json()).id;
}

export async function renameConversation(id: string, title: string): Promise<void> {
  await sendJson("POST", `v1/conversations/${encodeURIComponent(id)}`, { metadata: { title } });
}

export async function conversationTitle(id: string): Promise<string> {
  return (await getJson<{ metadata: { title?: string } }>(`v1/conversations/${encodeURIComponent(id)}`)).metadata.title ?? "Conversation";
}

export async function deleteConversation(id: string, fileIds: string[]): Promise<void> {
  await sendJson("DELETE", `v1/conversations/${encodeURIComponent(id)}`);
  await deleteFiles(fileIds);
}

/** Delete what is still there. */
export async function deleteFiles(fileIds: string[]): Promise<void> {
  await Promise.allSettled(fileIds.map((fileId) => sendJson("DELETE", `v1/files/${fileId}`)));
}

export async function loadTurns(id: string): Promise<Turn[]> {
  const turns: Turn[] = [];
  let thoughts: Item | undefined;
  for (let after = ""; ; ) {
    const page = await getJson<ItemList>(`v1/conversations/${encodeURIComponent(id)}/items?order=asc&limit=100${after && `&after=${after}`}`);
    for (const item of page.data) {
      if (thoughts && item.role !== "assistant") turns.push(onlyThoughts(thoughts));
      if (item.role === "assistant") turns.push({ ...(await turnOf(item, item.role)), ...(thoughts && thinking(thoughts)) });
      if (item.role === "user") turns.push(await turnOf(item, item.role));
      thoughts = item.type === "reasoning" ? item : undefined;
    }
    if (!page.has_more || !page.last_id) return thoughts ? [...turns, onlyThoughts(thoughts)] : turns;
    after = page.last_id;
  }
}

/** The names that the server gave the latest question and its answer. */
export async function latestItems(id: string): Promise<ItemNames> {
  const page = await getJson<ItemList>(`v1/conversations/${encodeURIComponent(id)}/items?order=desc&limit=3`);
  const question = page.data.findIndex((item) => item.role === "user");
  const answered = page.data.slice(0, question);
  return {
    question: page.data[question]?.id,
    thoughts: answered.find((item) => item.type === "reasoning")?.id,
    answer: answered.find((item) => item.role === "assistant")?.id,
  };
}

/** Keep a question and as much of an answer as there is; their names. */
export async function addTurns(id: string, question: Turn, answer: Turn): Promise<ItemNames> {
  const items = [
    { role: "user", content: inputParts(question) },
    { role: "assistant", content: [{ type: "output_text", text: answer.text }] },
  ];
  const added: ItemList = await (await sendJson("POST", `v1/conversations/${encodeURIComponent(id)}/items`, { items })).json();
  return { question: added.data[0]?.id, answer: added.data[1]?.id };
}

/** It is fine if it is gone already. */
export async function deleteItem(id: string, itemId: string): Promise<void> {
  try {
    await sendJson("DELETE", `v1/conversations/${encodeURIComponent(id)}/items/${itemId}`);
  } catch (error) {
    if (!(error instanceof ApiError && error.status === 404)) throw error;
  }
}

/** Send a file. Its id. onSent gets the bytes that were sent so far. lifetime: seconds until the server deletes it. */
export async function upload(attachment: Attachment, signal: AbortSignal, onSent: (bytes: number) => void, lifetime?: number): Promise<string> {
  const form = new FormData();
  form.append("purpose", "vision");
  if (lifetime) {
    form.append("expires_after[anchor]", "created_at");
    form.append("expires_after[seconds]", String(lifetime));
  }
  form.append("file", attachment.blob!, attachment.name);
  return (await (await sendForm("v1/files", form, signal, onSent)).json()).id;
}

export async function download(fileId: string): Promise<Blob> {
  return (await request(`v1/files/${fileId}/content`)).blob();
}

const downloads = new Map<string, Promise<Blob>>();

/** The bytes of a file, wherever they are. */
export function bytesOf(attachment: Attachment): Promise<Blob> {
  if (attachment.blob) return Promise.resolve(attachment.blob);
  const known = downloads.get(attachment.fileId!) ?? download(attachment.fileId!);
  downloads.set(attachment.fileId!, known);
  known.catch(() => downloads.delete(attachment.fileId!)); // it may be there the next time
  return known;
}

function thinking(item: Item): Partial<Turn> {
  return { thoughts: item.content.map((part) => part.text ?? "").join(""), thoughtsId: item.id };
}

/** An answer that the token limit ended before its text began. */
function onlyThoughts(item: Item): Turn {
  return { id: item.id, role: "assistant", text: "", attachments: [], ending: "length", ...thinking(item) };
}

async function turnOf(item: Item, role: "user" | "assistant"): Promise<Turn> {
  const attachments = await Promise.all(item.content.filter((part) => part.file_id).map(attachmentOf));
  const text = item.content.map((part) => part.text ?? "").join("");
  return { id: item.id, itemId: item.id, role, text, attachments, ...(role === "assistant" ? { ending: "complete" } : {}) };
}

async function attachmentOf({ type, file_id: fileId, pages }: Part): Promise<Attachment> {
  if (type === "input_image") return { id: fileId!, name: "Image", kind: "image", fileId };
  const name = await filename(fileId!);
  return { id: fileId!, name, kind: kindOf(name, "") ?? "document", fileId, pages };
}

/** The file's name; its id if it is gone. */
async function filename(fileId: string): Promise<string> {
  try {
    return (await getJson<{ filename: string }>(`v1/files/${fileId}`)).filename;
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return fileId;
    throw error;
  }
}
