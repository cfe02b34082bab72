import { useEffect, useRef, useState } from "react";

/** Takes files that are dropped on the page or pasted into it. Returns whether some are held over it. */
export function useDropAndPaste(onFiles: (files: File[]) => void): boolean {
  const [dragging, setDragging] = useState(false);
  const take = useRef(onFiles);
  take.current = onFiles;
  useEffect(() => {
    const hasFiles = (event: DragEvent) => event.dataTransfer?.types.includes("Files") ?? false;
    function over(event: DragEvent): void {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setDragging(true);
    }
    function leave(event: DragEvent): void {
      if (event.relatedTarget === null) setDragging(false);
    }
    function drop(event: DragEvent): void {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setDragging(false);
      take.current([...event.dataTransfer!.files]);
    }
    function paste(event: ClipboardEvent): void {
      const files = [...(event.clipboardData?.files ?? [])];
      if (files.length === 0) return;
      event.preventDefault();
      take.current(files);
    }
    addEventListener("dragover", over);
    addEventListener("dragleave", leave);
    addEventListener("drop", drop);
    addEventListener("paste", paste);
    return () => {
      removeEventListener("dragover", over);
      removeEventListener("dragleave", leave);
      removeEventListener("drop", drop);
      removeEventListener("paste", paste);
    };
  }, []);
  return dragging;
}
