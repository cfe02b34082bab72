/** All conversations, and the answers that are under way. Each may go on while another one is looked at. */

import { useSyncExternalStore } from "react";
import { chat, respond, type Piece, type Usage } from "../api/answers";
import { ApiError, type Wait } from "../api/client";
import * as history from "../api/history";
import { explain } from "../api/problems";
import { describeWait, duration, percent, rate } from "../format";
import * as database from "./database";
import { getSettings } from "./settings";
import { newId, seen, type Conversation, type Ending, type Attachment, type ImageSize, type Place, type Turn } from "./types";

export interface Note {
  text: string;
  /** How much of it is done, from 0 to 1. */
  share?: number;
}

export interface State {
  /** False until the browser's database has been read. */
  ready: boolean;
  conversations: readonly Conversation[];
  answering: ReadonlySet<string>;
  /** Progress of the answer that is being generated, by conversation. */
  notes: Readonly<Record<string, Note>>;
}

/** Milliseconds between two looks of the page at an answer that comes. */
const FRAME = 40;
const TITLE_LENGTH = 60;
/** In milliseconds. */
const SECOND = 1000;

let state: State = { ready: false, conversations: [], answering: new Set(), notes: {} };
const listeners = new Set<() => void>();
const controllers = new Map<string, AbortController>();
const loaded = new Set<string>();

export function useSession(): State {
  return useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => state,
  );
}

function change(next: Partial<State>): void {
  state = { ...state, ...next };
  for (const listener of listeners) listener();
}

export function find(id: string): Conversation | undefined {
  return state.conversations.find((conversation) => conversation.id === id);
}

function update(id: string, make: (conversation: Conversation) => Conversation): void {
  change({ conversations: state.conversations.map((one) => (one.id === id ? make(one) : one)) });
}

function updateTurn(id: string, turnId: string, next: Partial<Turn>): void {
  update(id, (conversation) => ({
    ...conversation,
    turns: conversation.turns.map((turn) => (turn.id === turnId ? { ...turn, ...next } : turn)),
  }));
}

async function save(id: string): Promise<void> {
  const conversation = find(id);
  try {
    if (conversation) await database.saveConversation(conversation);
  } catch (error) {
    note(id, `This browser cannot keep the conversation: ${error instanceof Error ? error.message : error}`);
  }
}

function note(id: string, text: string, share?: number): void {
  change({ notes: { ...state.notes, [id]: { text, share } } });
}

/** Read what this browser knows. */
export async function start(): Promise<void> {
  let conversations: Conversation[] = [];
  try {
    conversations = await database.allConversations();
  } catch {
    // Private windows of some browsers have no database: the page works, and forgets.
  }
  for (const one of conversations) if (one.place === "browser") loaded.add(one.id);
  change({ ready: true, conversations: conversations.map(settled) });
}

/** An answer that was coming when the page was closed has ended there. */
function settled(conversation: Conversation): Conversation {
  const turns = conversation.turns.map((turn): Turn =>
    turn.role === "assistant" && !turn.ending ? { ...turn, ending: "stopped" } : turn,
  );
  return { ...conversation, turns };
}

/** Fetch what the server has of a conversation, one that this browser has never seen included. Throws ApiError. */
export async function load(id: string): Promise<void> {
  if (loaded.has(id)) return;
  const turns = await history.loadTurns(id);
  const known = find(id);
  if (!known) {
    const title = await history.conversationTitle(id);
    change({ conversations: [{ id, title, place: "server", updated: Date.now(), turns: [] }, ...state.conversations] });
  }
  loaded.add(id);
  const obsolete = new Set(known?.obsolete);
  const current = turns.filter((turn) => !obsolete.has(turn.id));
  update(id, (conversation) => ({ ...conversation, turns: [...current, ...unknownToServer(conversation.turns)] }));
  if (!known) await save(id);
}

/** The server has every answer that was complete, even if it could not be asked what it calls it. */
function unknownToServer(turns: Turn[]): Turn[] {
  const complete = (turn?: Turn) => turn?.ending === "complete" || turn?.ending === "length";
  return turns.filter((turn, index) => !complete(turn.role === "assistant" ? turn : turns[index + 1]));
}

export function isLoaded(id: string): boolean {
  return loaded.has(id);
}

/** Keep conversations of a file in this browser. Returns how many of them it did not have. */
export async function add(conversations: readonly Conversation[]): Promise<number> {
  const unknown = conversations.filter((one) => !find(one.id)).map(settled);
  for (const one of unknown) loaded.add(one.id);
  const all = [...unknown, ...state.conversations].sort((one, other) => other.updated - one.updated);
  change({ conversations: all });
  for (const one of unknown) await save(one.id);
  return unknown.length;
}

/** Ask something, in a new conversation if there is no `id`. Returns its id. Throws ApiError if it cannot be begun. */
export async function ask(id: string | undefined, text: string, attachments: Attachment[]): Promise<string> {
  const conversation = id ?? (await create(text, getSettings().place));
  const question: Turn = { id: newId(), role: "user", text, attachments };
  append(conversation, question);
  void run(conversation);
  return conversation;
}

async function create(text: string, place: Place): Promise<string> {
  const line = text.trim().split("\n")[0] ?? "";
  const title = (line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line) || "Image";
  const id = place === "server" ? await history.createConversation(title) : newId();
  loaded.add(id);
  change({ conversations: [{ id, title, place, updated: Date.now(), turns: [] }, ...state.conversations] });
  return id;
}

function append(id: string, question: Turn): void {
  const answer: Turn = { id: newId(), role: "assistant", text: "", attachments: [], model: getSettings().sampling.model };
  update(id, (conversation) => ({
    ...conversation,
    updated: Date.now(),
    turns: [...conversation.turns, question, answer],
  }));
  const moved = find(id)!;
  change({ conversations: [moved, ...state.conversations.filter((one) => one.id !== id)] });
}

/** Answer a question again, with changes if there are any. Removes later turns. */
export function askAgain(id: string, questionId: string, changed: Partial<Pick<Turn, "text" | "attachments">> = {}): void {
  const conversation = find(id);
  const index = conversation?.turns.findIndex((turn) => turn.id === questionId) ?? -1;
  if (!conversation || index < 0 || state.answering.has(id)) return;
  const gone = conversation.turns.slice(index).flatMap((turn) => [turn.thoughtsId, turn.itemId].filter((name) => name !== undefined));
  const question = { ...conversation.turns[index]!, ...changed, id: newId(), itemId: undefined };
  update(id, (one) => ({ ...one, turns: one.turns.slice(0, index), obsolete: [...(one.obsolete ?? []), ...gone] }));
  append(id, question);
  void run(id);
}

export function stop(id: string): void {
  controllers.get(id)?.abort();
}

export async function rename(id: string, title: string): Promise<void> {
  if (find(id)?.place === "server") await history.renameConversation(id, title);
  update(id, (conversation) => ({ ...conversation, title }));
  await save(id);
}

/** Delete a conversation wherever it is. Throws ApiError. */
export async function remove(id: string): Promise<void> {
  stop(id);
  const conversation = find(id);
  if (conversation?.place === "server") {
    try {
      const turns = loaded.has(id) ? conversation.turns : await history.loadTurns(id);
      const fileIds = turns.flatMap((turn) => turn.attachments.flatMap((attachment) => attachment.fileId ?? []));
      await history.deleteConversation(id, fileIds);
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 404)) throw error;
    }
  }
  change({ conversations: state.conversations.filter((one) => one.id !== id) });
  await database.forgetConversation(id).catch(() => undefined); // there is no database to forget it
}

/** Get the answer that stands, empty, at the end of a conversation. Whatever happens is told there. */
async function run(id: string): Promise<void> {
  const [question, answer] = find(id)!.turns.slice(-2) as [Turn, Turn];
  const controller = new AbortController();
  controllers.set(id, controller);
  change({ answering: new Set([...state.answering, id]) });
  await save(id);
  const progress = new Progress(id, answer.id);
  let ending: Ending = "failed";
  try {
    await prepare(id, question, controller.signal, (sent, total) => note(id, `Sending files: ${percent(sent, total)}`, sent / total));
    ending = await receive(id, question.id, controller.signal, progress);
  } catch (error) {
    if (controller.signal.aborted) ending = "stopped";
    else updateTurn(id, answer.id, { problem: explain(error) });
  }
  progress.finish(ending);
  await settle(id, question.id, answer.id);
  controllers.delete(id);
  change({ answering: new Set([...state.answering].filter((one) => one !== id)) });
  await save(id);
}

/** Bring the server's side up to date: what was cut off is deleted there, and new images are uploaded. */
async function prepare(id: string, question: Turn, signal: AbortSignal, onSent: (sent: number, total: number) => void): Promise<void> {
  const conversation = find(id)!;
  if (conversation.place !== "server") return;
  for (const itemId of conversation.obsolete ?? []) {
    await history.deleteItem(id, itemId);
    update(id, (one) => ({ ...one, obsolete: one.obsolete?.filter((other) => other !== itemId) }));
  }
  const attachments: Attachment[] = [];
  const missing = question.attachments.filter((attachment) => !attachment.fileId);
  const total = missing.reduce((sum, attachment) => sum + attachment.blob!.size, 0);
  let before = 0;
  for (const attachment of question.attachments) {
    if (attachment.fileId) attachments.push(attachment);
    else {
      const fileId = await history.upload(attachment, signal, (sent) => onSent(before + sent, total));
      attachments.push({ ...attachment, fileId });
      before += attachment.blob!.size;
    }
  }
  updateTurn(id, question.id, { attachments });
}

/** The answer, asked for again as long as the server says that it will soon be ready. */
async function receive(id: string, questionId: string, signal: AbortSignal, progress: Progress): Promise<Ending> {
  for (;;) {
    try {
      progress.begin();
      let ending: Ending = "failed";
      for await (const piece of pieces(id, questionId, signal, (wait) => progress.waits(wait))) {
        progress.add(piece);
        ending = piece.ending ?? ending;
      }
      return ending;
    } catch (error) {
      const soon = error instanceof ApiError && error.status === 503 && error.code === "unavailable";
      if (!soon || progress.text || progress.thoughts) throw error;
      progress.pause();
      note(id, `${error.message}. Your question is sent once the server is ready.`);
      await sleep(error.retryAfter ?? 1, signal);
    }
  }
}

function pieces(id: string, questionId: string, signal: AbortSignal, onWait: (wait: Wait) => void): AsyncGenerator<Piece> {
  const conversation = find(id)!;
  const { sampling } = getSettings();
  const last = conversation.turns.findIndex((turn) => turn.id === questionId);
  return conversation.place === "server"
    ? respond(id, conversation.turns[last]!, sampling, signal, onWait)
    : chat(seen(conversation.turns.slice(0, last + 1)), sampling, signal, onWait);
}

/** Learn what the server calls the two turns; one that was stopped it is told of. */
async function settle(id: string, questionId: string, answerId: string): Promise<void> {
  const conversation = find(id);
  const question = conversation?.turns.find((turn) => turn.id === questionId);
  const answer = conversation?.turns.find((turn) => turn.id === answerId);
  if (conversation?.place !== "server" || !question || !answer || answer.ending === "failed") return;
  try {
    let names: history.ItemNames;
    if (answer.ending !== "stopped") names = await history.latestItems(id);
    else if (answer.text) names = await history.addTurns(id, question, answer);
    else return;
    updateTurn(id, questionId, { itemId: names.question });
    updateTurn(id, answerId, { itemId: names.answer, thoughtsId: names.thoughts });
  } catch {
    // Without names the two stay in the browser as well, and the next load of the conversation shows both.
  }
}

/** Shows an answer while it comes, a few times a second however fast that is. */
class Progress {
  text = "";
  thoughts = "";
  private usage?: Usage;
  private imageSizes?: ImageSize[];
  private began = 0;
  private first?: number;
  private timer?: ReturnType<typeof setTimeout>;
  private clock?: ReturnType<typeof setInterval>;
  private wait?: Wait;
  private tokens = 0;

  constructor(
    private readonly id: string,
    private readonly turnId: string,
  ) {}

  begin(): void {
    this.began = performance.now();
    clearInterval(this.clock);
    this.clock = setInterval(() => this.tell(), SECOND);
  }

  pause(): void {
    clearInterval(this.clock);
  }

  /** Why the first token is not here yet. */
  waits(wait: Wait): void {
    this.wait = wait;
    this.tell();
  }

  add(piece: Piece): void {
    if (piece.usage) this.usage = piece.usage;
    if (piece.imageSizes) this.imageSizes = piece.imageSizes;
    if (piece.answerTokens) this.tokens = piece.answerTokens;
    if (!piece.text && !piece.thought) return;
    if (this.first === undefined) {
      this.first = performance.now();
      note(this.id, "");
    }
    this.text += piece.text ?? "";
    this.thoughts += piece.thought ?? "";
    this.timer ??= setTimeout(() => this.show(), FRAME);
  }

  finish(ending: Ending): void {
    clearTimeout(this.timer);
    clearInterval(this.clock);
    const ended = performance.now();
    const cost = this.usage && {
      ...this.usage,
      firstToken: ((this.first ?? ended) - this.began) / 1000,
      total: (ended - this.began) / 1000,
    };
    updateTurn(this.id, this.turnId, { text: this.text, thoughts: this.thoughts, ending, cost, imageSizes: this.imageSizes });
    note(this.id, "");
  }

  private tell(): void {
    const now = performance.now();
    const waited = (now - this.began) / SECOND;
    if (this.first === undefined) {
      if (waited >= 1) note(this.id, `${describeWait(this.wait)} · ${duration(waited)}`, share(this.wait));
    } else if (this.tokens > 1 && now - this.first >= SECOND) {
      note(this.id, `${this.tokens} tokens · ${rate(((this.tokens - 1) * SECOND) / (now - this.first))} tokens/s`);
    }
  }

  private show(): void {
    this.timer = undefined;
    updateTurn(this.id, this.turnId, { text: this.text, thoughts: this.thoughts });
  }
}

/** How much of a long step is done, if it is known. */
function share(wait: Wait | undefined): number | undefined {
  if (wait?.state === "prompt") return wait.tokens / wait.total;
  return wait?.state === "sending" && wait.sent < wait.total ? wait.sent / wait.total : undefined;
}

function sleep(seconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}
