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
  p: ({ children }) => <p dir="auto">{children}</p>,
  li: ({ children, className }) => (
    <li dir="auto" className={className}>
      {children}
    </li>
  ),
  h1: ({ children }) => <h1 dir="auto">{children}</h1>,
  h2: ({ children }) => <h2 dir="auto">{children}</h2>,
  h3: ({ children }) => <h3 dir="auto">{children}</h3>,
  h4: ({ children }) => <h4 dir="auto">{children}</h4>,
  blockquote: ({ children }) => <blockquote dir="auto">{children}</blockquote>,
  th: ({ children, style }) => (
    <th dir="auto" className={cellClass(children)} style={style}>
      {children}
    </th>
  ),
  td: ({ children, style }) => (
    <td dir="auto" className={cellClass(children)} style={style}>
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
  // An answer must not make the browser load something from anywhere: whoever wrote it would learn of that.
  img: ({ src, alt }) => (
    <a href={typeof src === "string" ? src : undefined} target="_blank" rel="noreferrer noopener">
      {alt || "image"}
    </a>
  ),
  table: ({ children }) => (
    <div className="scrolls" tabIndex={0} role="region" aria-label="Table">
      <table dir="auto">{children}</table>
    </div>
  ),
};

/** What a model wrote, as Markdown, or as a table if it is JSON. HTML in it is shown as text. */
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
    <div className="code">
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
