/** Conversations in the browser's own database. */

import { openDB, type DBSchema, type IDBPDatabase } from "idb";
import type { Conversation } from "./types";

interface Schema extends DBSchema {
  conversations: { key: string; value: Conversation };
  drafts: { key: string; value: Draft };
}

/** An unsent question. */
export interface Draft {
  conversation: string;
  text: string;
}

let opened: Promise<IDBPDatabase<Schema>> | undefined;

function database(): Promise<IDBPDatabase<Schema>> {
  opened ??= openDB<Schema>("vlmserve", 1, {
    upgrade(db) {
      db.createObjectStore("conversations", { keyPath: "id" });
      db.createObjectStore("drafts", { keyPath: "conversation" });
    },
  });
  return opened;
}

/** All of them, the latest first. */
export async function allConversations(): Promise<Conversation[]> {
  const all = await (await database()).getAll("conversations");
  return all.sort((one, other) => other.updated - one.updated);
}

/** If the server stores the conversation, only the data that it lacks. */
export async function saveConversation(conversation: Conversation): Promise<void> {
  const turns = conversation.place === "server" ? conversation.turns.filter((turn) => !turn.itemId) : conversation.turns;
  await (await database()).put("conversations", { ...conversation, turns });
}

export async function forgetConversation(id: string): Promise<void> {
  const db = await database();
  await db.delete("conversations", id);
  await db.delete("drafts", id);
}

export async function readDraft(conversation: string): Promise<string> {
  return (await (await database()).get("drafts", conversation))?.text ?? "";
}

export async function saveDraft(conversation: string, text: string): Promise<void> {
  const db = await database();
  if (text) await db.put("drafts", { conversation, text });
  else await db.delete("drafts", conversation);
}
