/** The list of conversations by date and search. */

import type { Conversation } from "./types";

export interface Shelf {
  /** Such as "Today" or "May 2026". */
  label: string;
  conversations: Conversation[];
}

const DAY = 86_400_000; // in milliseconds
const WEEK = 7;

/** Group conversations, the newest first, by date. */
export function shelves(conversations: readonly Conversation[], now: Date): Shelf[] {
  const found: Shelf[] = [];
  for (const conversation of conversations) {
    const label = dateOf(conversation.updated, now);
    if (found.at(-1)?.label !== label) found.push({ label, conversations: [] });
    found.at(-1)!.conversations.push(conversation);
  }
  return found;
}

/** True if a title or turn of a conversation has all words of a search. */
export function matches(conversation: Conversation, search: string): boolean {
  const text = [conversation.title, ...conversation.turns.flatMap((turn) => [turn.text, ...turn.attachments.map(({ name }) => name)])]
    .join("\n")
    .toLowerCase();
  return search.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function dateOf(time: number, now: Date): string {
  const midnight = new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime();
  const days = Math.ceil((midnight - time) / DAY);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days < WEEK) return "Last 7 days";
  return new Date(time).toLocaleDateString("en-US", { month: "long", year: "numeric" });
}
