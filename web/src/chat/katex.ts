/** A chunk of its own, which is loaded for the first formula. */

import "katex/dist/katex.min.css";
import katex from "katex";

/** Set a formula into an element. One with mistakes is shown as it was written. */
export function typeset(tex: string, display: boolean, element: HTMLElement): void {
  // A formula must not load anything, nor take long to set.
  katex.render(tex, element, { displayMode: display, throwOnError: false, trust: false, strict: "ignore", maxExpand: 500, maxSize: 20 });
}
