/** Answers in JSON, as far as they can be shown as tables. */

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };
export type JsonObject = { [name: string]: Json };

/** Values in a table, and levels of tables in tables, beyond which nobody reads it. */
const MOST_VALUES = 2000;
const MOST_LEVELS = 6;
const MOST_COLUMNS = 12;

/** The object or array that a text is; undefined if it is none, or one that is too large for a table. */
export function parseJson(text: string): Json | undefined {
  if (!/^\s*[[{]/.test(text)) return undefined;
  let value: Json;
  try {
    value = JSON.parse(text);
  } catch {
    return undefined; // it has not come to its end yet, or is something else
  }
  return size(value, 0) <= MOST_VALUES ? value : undefined;
}

/** The names of all members, if the values are objects that make the rows of one table. */
export function columnsOf(values: Json[]): string[] | undefined {
  if (values.length === 0 || !values.every(isObject)) return undefined;
  const names = [...new Set(values.flatMap((value) => Object.keys(value)))];
  return names.length > 0 && names.length <= MOST_COLUMNS ? names : undefined;
}

export function isObject(value: Json | undefined): value is JsonObject {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function size(value: Json, level: number): number {
  if (typeof value !== "object" || value === null) return 1;
  if (level === MOST_LEVELS) return Infinity;
  return Object.values(value).reduce<number>((sum, inner) => sum + size(inner, level + 1), 1);
}
