/** Images no larger than a model sees them. */

import type { Attachment } from "./types";

/** Areas that the model sees: models that cut images into tiles stretch one side. */
const SPARE = 2;
const QUALITY = 0.92;
/** Formats that browsers read and write. */
const FORMATS = ["image/png", "image/jpeg", "image/webp"];

/** The width and height of an image with at most `maxPixels`, in whole pixels. */
export function shrunkSize(width: number, height: number, maxPixels: number): [width: number, height: number] {
  const share = Math.min(1, Math.sqrt(maxPixels / (width * height)));
  return [Math.max(1, Math.round(width * share)), Math.max(1, Math.round(height * share))];
}

/** Scale images down to the model's maximum; other files do not change. maxPixels: maximum area. */
export async function allShrunk(attachments: readonly Attachment[], maxPixels?: number | null): Promise<Attachment[]> {
  if (!maxPixels) return [...attachments];
  const fitting: Attachment[] = [];
  for (const attachment of attachments) fitting.push(await shrunk(attachment, maxPixels));
  return fitting;
}

async function shrunk(attachment: Attachment, maxPixels: number): Promise<Attachment> {
  const { blob, kind } = attachment;
  if (kind !== "image" || !blob || !FORMATS.includes(blob.type)) return attachment;
  const image = await createImageBitmap(blob).catch(() => undefined); // the server says what is wrong with it
  if (!image) return attachment;
  const [width, height] = shrunkSize(image.width, image.height, SPARE * maxPixels);
  const isSmall = width === image.width && height === image.height;
  const smaller = isSmall ? blob : await painted(image, width, height).convertToBlob({ type: blob.type, quality: QUALITY });
  image.close();
  return smaller.size < blob.size ? { ...attachment, blob: smaller } : attachment;
}

function painted(image: ImageBitmap, width: number, height: number): OffscreenCanvas {
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d")!;
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, width, height);
  return canvas;
}
