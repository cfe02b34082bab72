/** The results of a batch, joined from its files. */

import { newId, type Attachment } from "../state/types";

export interface Result {
  id: string;
  /** The file that the request is about, if it was uploaded. */
  file?: Attachment;
  answer?: string;
  error?: string;
}

interface Part {
  type?: string;
  text?: string;
  file_id?: string;
}

interface Line {
  custom_id: string;
  body?: { input?: { content?: Part[] }[] };
  response?: { body?: Answer & { error?: { message?: string } } } | null;
  error?: { message?: string } | null;
}

interface Answer {
  choices?: { text?: string; message?: { content?: string | null } }[];
  output?: { type?: string; content?: Part[] }[];
}

/** Join the files of a batch, in the order of its requests. */
export function resultsOf(files: { input: string; output: string; errors: string }): Result[] {
  const results = new Map<string, Result>();
  for (const line of linesOf(files.input)) results.set(line.custom_id, { id: line.custom_id, file: fileOf(line) });
  for (const line of linesOf(files.output)) {
    results.set(line.custom_id, { ...results.get(line.custom_id), id: line.custom_id, answer: textOf(line.response?.body) });
  }
  for (const line of linesOf(files.errors)) {
    const error = line.response?.body?.error?.message ?? line.error?.message ?? "It failed";
    results.set(line.custom_id, { ...results.get(line.custom_id), id: line.custom_id, error });
  }
  return [...results.values()].filter(({ answer, error }) => answer !== undefined || error !== undefined);
}

/** Results as a table for spreadsheets: https://www.rfc-editor.org/rfc/rfc4180 */
export function asCsv(results: readonly Result[]): string {
  const rows = results.map(({ id, answer = "", error = "" }) => [id, answer, error]);
  return [["id", "answer", "error"], ...rows].map((row) => `${row.map(cell).join()}\r\n`).join("");
}

function cell(text: string): string {
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function linesOf(text: string): Line[] {
  return text.split("\n").flatMap((line) => {
    try {
      return line.trim() ? [JSON.parse(line)] : [];
    } catch {
      return []; // an input file may have wrong lines
    }
  });
}

function fileOf(line: Line): Attachment | undefined {
  const part = line.body?.input?.[0]?.content?.find?.(({ file_id }) => file_id);
  if (!part) return undefined;
  return { id: newId(), name: line.custom_id, kind: part.type === "input_image" ? "image" : "document", fileId: part.file_id };
}

function textOf(answer?: Answer): string {
  if (answer?.output) {
    const messages = answer.output.filter(({ type }) => type === "message");
    return messages.flatMap(({ content }) => content?.map(({ text }) => text ?? "") ?? []).join("");
  }
  return answer?.choices?.map(({ text, message }) => message?.content ?? text ?? "").join("\n") ?? "";
}
