/** Files of requests: a question about each of many images, and a sample. */

import { responseBody } from "../api/answers";
import type { Sampling } from "../state/settings";
import { kindOf, newId, type Attachment } from "../state/types";

/** The images and documents among files, named and sorted by their paths in the chosen folder. */
export function readable(files: Iterable<File>): Attachment[] {
  const found = [...files].flatMap((file): Attachment[] => {
    const kind = kindOf(file.name, file.type);
    if (kind !== "image" && kind !== "document") return [];
    const [, ...inside] = file.webkitRelativePath.split("/");
    return [{ id: newId(), name: inside.join("/") || file.name, kind, blob: file }];
  });
  return found.sort((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
}

/** A line for each uploaded file. */
export function requestsAbout(files: readonly Attachment[], question: string, model: string, sampling: Sampling): string {
  const taken = new Map<string, number>();
  const lines = files.map((file) => {
    const times = (taken.get(file.name) ?? 0) + 1;
    taken.set(file.name, times);
    return JSON.stringify({
      custom_id: times > 1 ? `${file.name} (${times})` : file.name,
      method: "POST",
      url: "/v1/responses",
      body: { ...responseBody({ text: question, attachments: [file] }, sampling), model: sampling.model ?? model, store: false },
    });
  });
  return `${lines.join("\n")}\n`;
}

/** A file of requests to start from. */
export function sampleRequests(model: string): string {
  const content = [
    { type: "image_url", image_url: { url: "https://example.com/photo.jpg" } },
    { type: "text", text: "What is in this image?" },
  ];
  return [["text", "Name three colours."], ["image", content]]
    .map(([id, asked]) => {
      const body = { model, messages: [{ role: "user", content: asked }], max_tokens: 100 };
      return `${JSON.stringify({ custom_id: id, method: "POST", url: "/v1/chat/completions", body })}\n`;
    })
    .join("");
}
