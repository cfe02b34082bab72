import { memo, useMemo, type ReactElement, type ReactNode } from "react";
import ReactMarkdown, { type Components } from "react-markdown";
import remarkGfm from "remark-gfm";
import { CopyButton } from "./copy-button";
import { highlighted } from "./highlighter";
import { parseJson } from "./json";
import { JsonBlock } from "./json-table";

const PLUGINS = [remarkGfm];
const COMPONENTS: Components = {
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
      <table>{children}</table>
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
          {text}
        </ReactMarkdown>
      ) : (
        <JsonBlock value={json} text={text} />
      )}
    </div>
  );
});

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
