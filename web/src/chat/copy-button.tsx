import { Check, Copy } from "lucide-react";
import { useEffect, useState } from "react";
import { copyText } from "../copy";

const SHOWN = 1500;

export function CopyButton({ text, what }: { text: string; what: string }) {
  const [copied, setCopied] = useState(false);
  useEffect(() => {
    if (!copied) return;
    const timer = setTimeout(() => setCopied(false), SHOWN);
    return () => clearTimeout(timer);
  }, [copied]);
  const label = copied ? "Copied" : `Copy ${what}`;
  return (
    <button type="button" className="icon small" aria-label={label} title={label} onClick={() => void copyText(text).then(() => setCopied(true))}>
      {copied ? <Check /> : <Copy />}
    </button>
  );
}
