import { Braces, Table } from "lucide-react";
import { useState } from "react";
import { CopyButton } from "./copy-button";
import { highlighted } from "./highlighter";
import { columnsOf, isObject, type Json } from "./json";

/** JSON as a table, or as it was written. */
export function JsonBlock({ value, text }: { value: Json; text: string }) {
  const [raw, setRaw] = useState(false);
  return (
    <div className="code">
      <div className="head">
        <span>json</span>
        <span className="buttons">
          <button className="icon small" aria-label={raw ? "Show as a table" : "Show as text"} onClick={() => setRaw(!raw)}>
            {raw ? <Table /> : <Braces />}
          </button>
          <CopyButton text={text} what="the code" />
        </span>
      </div>
      {raw ? (
        <pre tabIndex={0} aria-label="Code in json">
          <code>{highlighted(text, "json")}</code>
        </pre>
      ) : (
        <div className="scrolls json" tabIndex={0} role="region" aria-label="Table">
          <Value value={value} />
        </div>
      )}
    </div>
  );
}

function Value({ value }: { value: Json | undefined }) {
  if (value === undefined) return null;
  if (isObject(value) && Object.keys(value).length > 0) return <Members members={Object.entries(value)} />;
  if (Array.isArray(value) && value.length > 0) return <Items items={value} />;
  if (typeof value === "string") return value;
  return <span className="plain">{JSON.stringify(value)}</span>;
}

function Members({ members }: { members: [string, Json][] }) {
  return (
    <table>
      <tbody>
        {members.map(([name, value]) => (
          <tr key={name}>
            <th scope="row">{name}</th>
            <td>
              <Value value={value} />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** Objects as rows of a table; other values one below the other. */
function Items({ items }: { items: Json[] }) {
  const columns = columnsOf(items);
  if (items.every((item) => typeof item === "number")) return <span className="plain">{items.join(", ")}</span>;
  if (!columns) {
    return (
      <ul>
        {items.map((item, index) => (
          <li key={index}>
            <Value value={item} />
          </li>
        ))}
      </ul>
    );
  }
  return (
    <table>
      <thead>
        <tr>
          {columns.map((name) => (
            <th key={name} scope="col">
              {name}
            </th>
          ))}
        </tr>
      </thead>
      <tbody>
        {items.map((item, index) => (
          <tr key={index}>
            {columns.map((name) => (
              <td key={name}>
                <Value value={isObject(item) ? item[name] : undefined} />
              </td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}
