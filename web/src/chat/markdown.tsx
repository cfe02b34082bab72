import { memo, useMemo, type ReactElement, type ReactNode } from "react";
import ReactMarkdown, { type Components } from "react-markdown";
import remarkGfm from "remark-gfm";
import { CopyButton } from "./copy-button";
import { FormulaView } from "./formula-view";
import { formulaOf, withFormulas } from "./formulas";
import { highlighted } from "./highlighter";
import { parseJson } from "./json";
import { JsonBlock } from "./json-table";

const PLUGINS = [remarkGfm];
/** Characters of the longest cell that stays on one line. */
const SHORT = 24;
const COMPONENTS: Components = {
  // The browser finds the direction of each of these in its text. Blocks inside have no direction of their own, or it
  // would skip them (styles/chat.css: "plaintext").
  ul: ({ children, className }) => (
    <ul dir="auto" className={className}>
      {children}
    </ul>
  ),
  ol: ({ children, className, start }) => (
    <ol dir="auto" className={className} start={start}>
      {children}
    </ol>
  ),
  blockquote: ({ children }) => <blockquote dir="auto">{children}</blockquote>,
  th: ({ children, style }) => (
    <th className={cellClass(children)} style={style}>
      {children}
    </th>
  ),
  td: ({ children, style }) => (
    <td className={cellClass(children)} style={style}>
      {children}
    </td>
  ),
  code: ({ children, className }) => {
    const formula = typeof children === "string" ? formulaOf(children) : undefined;
    if (formula) return <FormulaView {...formula} />;
    return (
      <code className={className} dir="ltr">
        {children}
      </code>
    );
  },
  pre: ({ children }) => <CodeBlock>{children}</CodeBlock>,
  a: ({ href, children }) => (
    <a href={href} target="_blank" rel="noreferrer noopener">
      {children}
    </a>
  ),
  // An answer must not make the browser load anything: the author of a prompt could then read the conversation.
  img: ({ src, alt }) => (
    <a href={typeof src === "string" ? src : undefined} target="_blank" rel="noreferrer noopener">
      {alt || "image"}
    </a>
  ),
  table: ({ children }) => (
    <div className="scrolls" dir="auto" tabIndex={0} role="region" aria-label="Table">
      <table>{children}</table>
    </div>
  ),
};

/** An answer as Markdown, or as a table if it is JSON. HTML is shown as text. */
export const Markdown = memo(function Markdown({ text }: { text: string }) {
  const json = useMemo(() => parseJson(text), [text]);
  return (
    <div className="markdown">
      {json === undefined ? (
        <ReactMarkdown remarkPlugins={PLUGINS} components={COMPONENTS}>
          {withFormulas(text)}
        </ReactMarkdown>
      ) : (
        <JsonBlock value={json} text={text} />
      )}
    </div>
  );
});

/** Dates and prices must not break at their hyphens. */
function cellClass(children: ReactNode): string | undefined {
  return typeof children !== "string" || children.length <= SHORT ? "short" : undefined;
}

function CodeBlock({ children }: { children: ReactNode }) {
  const { className = "", children: content } = (children as ReactElement<{ className?: string; children?: ReactNode }>).props;
  const language = /language-(\S+)/.exec(className)?.[1] ?? "";
  const code = String(content ?? "").replace(/\n$/, "");
  const shown = useMemo(() => highlighted(code, language), [code, language]);
  const json = useMemo(() => (language === "json" ? parseJson(code) : undefined), [code, language]);
  if (json !== undefined) return <JsonBlock value={json} text={code} />;
  return (
    <div className="code" dir="ltr">
      <div className="head">
        <span>{language || "code"}</span>
        <CopyButton text={code} what="the code" />
      </div>
      <pre tabIndex={0} aria-label={language ? `Code in ${language}` : "Code"}>
        <code>{shown}</code>
      </pre>
    </div>
  );
}
