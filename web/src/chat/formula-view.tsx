import { memo, useEffect, useRef } from "react";
import type { Formula } from "./formulas";

/** A formula, as it was written until what sets it is loaded. */
export const FormulaView = memo(function FormulaView({ tex, display }: Formula) {
  const place = useRef<HTMLSpanElement>(null);
  useEffect(() => {
    let left = false;
    import("./katex").then(
      ({ typeset }) => left || typeset(tex, display, place.current!),
      () => undefined, // the server is gone: the formula stays as it was written
    );
    return () => {
      left = true;
    };
  }, [tex, display]);
  return (
    <span key={tex} ref={place} className={display ? "formula display" : "formula"} dir="ltr" tabIndex={display ? 0 : undefined}>
      {tex}
    </span>
  );
});
