/** Asking: the whole conversation at once, or its latest question where the server keeps the rest. */

import type { Attachment, ImageSize, Turn } from "../state/types";
import type { Sampling } from "../state/settings";
import { dataUrl } from "../state/data-url";
import { ApiError, brokenOff, events, sendForStream, type Wait } from "./client";

export interface Usage {
  promptTokens: number;
  cachedTokens: number;
  answerTokens: number;
}

/** A piece of an answer. The last one says how it ended. */
export interface Piece {
  text?: string;
  /** Reasoning before the answer. */
  thought?: string;
  usage?: Usage;
  /** Tokens so far. */
  answerTokens?: number;
  /** One entry for each image of the conversation so far, in order. */
  imageSizes?: ImageSize[];
  ending?: "complete" | "length";
}

interface ChatChunk {
  error?: { message: string; code: string };
  choices?: { delta: { content?: string | null; reasoning_content?: string | null }; finish_reason: string | null }[];
  usage?: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens: number } } | null;
  image_sizes?: ImageSize[];
}

interface ResponseEvent {
  type: string;
  delta?: string;
  response?: {
    error: { message: string } | null;
    usage: { input_tokens: number; output_tokens: number; input_tokens_details: { cached_tokens: number } } | null;
    image_sizes?: ImageSize[];
  };
}

const STREAM_OPTIONS = { include_usage: true, continuous_usage_stats: true };

/** An answer to all of these turns. onWait is told why the first token is not here yet. Throws ApiError. */
export async function* chat(turns: Turn[], settings: Sampling, signal: AbortSignal, onWait: (wait: Wait) => void): AsyncGenerator<Piece> {
  const messages: unknown[] = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const turn of turns) messages.push({ role: turn.role, content: await chatContent(turn) });
  const { maxTokens, system: _, ...sampling } = settings;
  const body = { ...sampling, max_completion_tokens: maxTokens, messages, stream: true, stream_options: STREAM_OPTIONS };
  const response = await sendForStream("v1/chat/completions", body, signal, onWait);
  let ending: Piece["ending"];
  for await (const event of events(response, signal, onWait)) {
    const chunk = event as ChatChunk;
    if (chunk.error) throw new ApiError(500, chunk.error.code, chunk.error.message);
    const choice = chunk.choices?.[0];
    if (choice?.finish_reason) ending = choice.finish_reason === "length" ? "length" : "complete";
    if (choice?.delta.reasoning_content) yield { thought: choice.delta.reasoning_content };
    if (choice?.delta.content) yield { text: choice.delta.content };
    if (choice && chunk.usage) yield { answerTokens: chunk.usage.completion_tokens };
    else if (chunk.usage) {
      const cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
      const usage = { promptTokens: chunk.usage.prompt_tokens, cachedTokens, answerTokens: chunk.usage.completion_tokens };
      yield { usage, imageSizes: chunk.image_sizes };
    }
  }
  if (!ending) throw brokenOff();
  yield { ending };
}

/** An answer to one question in a conversation that the server keeps. Its images are uploaded. See `chat`. */
export async function* respond(
  conversation: string,
  question: Turn,
  settings: Sampling,
  signal: AbortSignal,
  onWait: (wait: Wait) => void,
): AsyncGenerator<Piece> {
  const body = { ...responseBody(question, settings), conversation, stream: true, truncation: "auto" };
  const response = await sendForStream("v1/responses", body, signal, onWait);
  let ending: Piece["ending"];
  let deltas = 0;
  for await (const raw of events(response, signal, onWait)) {
    const event = raw as ResponseEvent;
    if (event.type === "response.reasoning_text.delta") yield { thought: event.delta };
    if (event.type === "response.output_text.delta") yield { text: event.delta, answerTokens: ++deltas };
    if (event.type === "response.failed") {
      throw new ApiError(500, "generation_failed", event.response?.error?.message ?? "The server ended the answer");
    }
    if (event.type === "response.completed" || event.type === "response.incomplete") {
      ending = event.type === "response.completed" ? "complete" : "length";
      const usage = event.response?.usage;
      if (usage) {
        const cachedTokens = usage.input_tokens_details.cached_tokens;
        const tokens = { promptTokens: usage.input_tokens, cachedTokens, answerTokens: usage.output_tokens };
        yield { usage: tokens, imageSizes: event.response?.image_sizes };
      }
    }
  }
  if (!ending) throw brokenOff();
  yield { ending };
}

/** A request to v1/responses with one question. */
export function responseBody(question: Pick<Turn, "text" | "attachments">, settings: Sampling): object {
  const { maxTokens, system, ...sampling } = settings;
  const input = [{ role: "user", content: inputParts(question) }];
  return { ...sampling, max_output_tokens: maxTokens, instructions: system, input };
}

export function inputParts(question: Pick<Turn, "text" | "attachments">): unknown[] {
  const shown = question.attachments.map(({ kind, fileId, pages }) => ({
    type: kind === "image" ? "input_image" : "input_file",
    file_id: fileId,
    pages,
  }));
  return question.text ? [...shown, { type: "input_text", text: question.text }] : shown;
}

async function chatContent(turn: Turn): Promise<unknown> {
  if (turn.attachments.length === 0) return turn.text;
  const shown = await Promise.all(turn.attachments.map(attachmentPart));
  return turn.text ? [...shown, { type: "text", text: turn.text }] : shown;
}

async function attachmentPart(attachment: Attachment): Promise<unknown> {
  const url = await dataUrl(attachment.blob!);
  if (attachment.kind === "document") return { type: "file", file: { filename: attachment.name, file_data: url }, pages: attachment.pages };
  return attachment.kind === "video" ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } };
}
