/** Small images of a document's pages, which the server renders. */

import type { Attachment } from "../state/types";
import { request } from "./client";
import { bytesOf } from "./history";

export interface Previews {
  numPages: number;
  pages: { page: number; width: number; height: number; image: string }[];
}

/** Bytes; a larger document is not sent only to be shown. */
const LARGEST = 20_000_000;
const known = new Map<string, Promise<Previews>>();

/** Pages of a document; `pages` as in "1-8". Throws ApiError. */
export function previews(document: Attachment, pages: string): Promise<Previews> {
  const key = `${document.id} ${pages}`;
  const found = known.get(key) ?? rendered(document, pages);
  known.set(key, found);
  found.catch(() => known.delete(key)); // it may succeed the next time
  return found;
}

async function rendered(document: Attachment, pages: string): Promise<Previews> {
  const blob = await bytesOf(document);
  if (blob.size > LARGEST) throw new Error("The document is too large to be shown");
  const form = new FormData();
  form.append("pages", pages);
  form.append("file", blob, document.name);
  const { num_pages: numPages, data } = await (await request("v1/documents/previews", { method: "POST", body: form })).json();
  return { numPages, pages: data };
}
