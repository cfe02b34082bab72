/** Files inside JSON. */

export function dataUrl(blob: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(reader.error ?? new Error("The file can no longer be read"));
    reader.readAsDataURL(blob);
  });
}

/** The bytes of a data URL. Throws an error for other text. */
export function blobOf(url: string): Blob {
  const parts = /^data:([\w./+-]*)(?:;[\w=-]+)*;base64,/.exec(url);
  if (!parts) throw new Error("A file is no data URL");
  const bytes = Uint8Array.from(atob(url.slice(parts[0].length)), (character) => character.charCodeAt(0));
  return new Blob([bytes], { type: parts[1] });
}
