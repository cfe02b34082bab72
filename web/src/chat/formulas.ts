/** Finds formulas in Markdown: `$…$`, `$$…$$`, `\(…\)` and `\[…\]`, but no prices and nothing in code. */

export interface Formula {
  tex: string;
  /** On a line of its own. */
  display: boolean;
}

/** Characters that no model writes. They begin a code span that is a formula. */
const INLINE = "\ue000";
const DISPLAY = "\ue001";

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
/** `$` begins no price: no blank follows it, none stands before the one that ends it, and no digit follows that. */
const DOLLARS = /^\$(?=[^\s$])((?:\\.|[^\\$\n])*?(?:\\\S|[^\s\\$]))\$(?![\p{L}\p{N}$])/u;
const DISPLAYED = [/^\$\$((?:\\.|[^\\$]|\$(?!\$))+)\$\$/, /^\\\[([^]*?)\\\]/];
const PARENTHESES = /^\\\(([^]*?)\\\)/;
const BLANK_LINE = /\n[ \t]*\n/;

/** The same Markdown with code spans in place of its formulas, for `formulaOf`. */
export function withFormulas(text: string): string {
  if (!/\$|\\[([]/.test(text)) return text;
  let result = "";
  let lines = "";
  let fence = "";
  for (const line of text.split(/(?<=\n)/)) {
    const mark = FENCE.exec(line)?.[1];
    if (!fence && !mark) lines += line;
    else {
      result += inText(lines) + line;
      lines = "";
      if (!fence) fence = mark!;
      else if (mark?.startsWith(fence) && !line.trim().slice(mark.length)) fence = "";
    }
  }
  return result + inText(lines);
}

/** The formula that a code span stands for. */
export function formulaOf(code: string): Formula | undefined {
  if (code[0] !== INLINE && code[0] !== DISPLAY) return undefined;
  return { tex: code.slice(1).trim(), display: code[0] === DISPLAY };
}

/** The same for text without fenced code. */
function inText(text: string): string {
  let result = "";
  let index = 0;
  while (index < text.length) {
    const rest = text.slice(index);
    const [taken, formula] = codeSpan(rest) ?? formulaAt(rest, text[index - 1] ?? "") ?? [rest.slice(0, rest[0] === "\\" ? 2 : 1)];
    result += formula ? asCode(formula, isRow(text, index)) : taken;
    index += taken.length;
  }
  return result;
}

/** A code span at the beginning of the text. */
function codeSpan(text: string): [string] | undefined {
  const marks = /^`+/.exec(text)?.[0];
  if (!marks) return undefined;
  const end = new RegExp(`(?<!\`)${marks}(?!\`)`, "g");
  end.lastIndex = marks.length;
  const found = end.exec(text);
  return [found ? text.slice(0, found.index + marks.length) : marks];
}

function formulaAt(text: string, before: string): [string, Formula] | undefined {
  for (const pattern of DISPLAYED) {
    const [all, tex] = pattern.exec(text) ?? [];
    if (all && tex && isFormula(tex)) return [all, { tex, display: true }];
  }
  const [all, tex] = PARENTHESES.exec(text) ?? (/[\p{L}\p{N}$]/u.test(before) ? null : DOLLARS.exec(text)) ?? [];
  return all && tex && isFormula(tex) ? [all, { tex, display: false }] : undefined;
}

function isFormula(tex: string): boolean {
  return tex.trim() !== "" && !BLANK_LINE.test(tex.trim());
}

function asCode({ tex, display }: Formula, row: boolean): string {
  const marks = "`".repeat(1 + Math.max(0, ...[...tex.matchAll(/`+/g)].map(([run]) => run.length)));
  // A comment would hide what follows it on the one line that is left.
  let line = tex.replace(/(?<!\\)%.*$/gm, "").replace(/\s*\n\s*/g, " ");
  if (row) line = line.replace(/\\\|/g, "\\Vert ").replace(/\|/g, "\\vert ");
  return `${marks}${display ? DISPLAY : INLINE} ${line.trim()} ${marks}`;
}

/** True for a place in a table row, whose cells end at bars. */
function isRow(text: string, index: number): boolean {
  return /^\s*\|/.test(text.slice(text.lastIndexOf("\n", index - 1) + 1, index));
}
