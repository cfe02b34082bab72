/** Single keys that do something while nobody types. */

import { useEffect } from "react";
import { useSettings } from "./state/settings";

export const SHORTCUTS: [keys: string, what: string][] = [
  ["n", "New conversation"],
  ["/", "Write a question"],
  ["d", "Draw an image"],
  ["l", "Live view"],
  ["b", "Batches"],
  ["c", "Chat"],
  [",", "Settings"],
  ["?", "This list"],
];

export const ALWAYS: [keys: string, what: string][] = [
  ["Enter", "Send the question"],
  ["Shift+Enter", "A new line in the question"],
  ["Up", "In an empty question: edit the one before"],
  ["Esc", "Stop the answer, or close what is open"],
];

export function useShortcuts(actions: Record<string, () => void>): void {
  const { shortcuts } = useSettings();
  useEffect(() => {
    if (!shortcuts) return;
    function press(event: KeyboardEvent): void {
      const target = event.target as HTMLElement;
      const action = actions[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      if (target.closest("input, textarea, select, [contenteditable], dialog, canvas")) return;
      event.preventDefault();
      action();
    }
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  });
}
