/** Colours for the languages that answers about images are likely to hold. */

import bash from "highlight.js/lib/languages/bash";
import cpp from "highlight.js/lib/languages/cpp";
import css from "highlight.js/lib/languages/css";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import markdown from "highlight.js/lib/languages/markdown";
import python from "highlight.js/lib/languages/python";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import { toJsxRuntime } from "hast-util-to-jsx-runtime";
import { createLowlight } from "lowlight";
import { Fragment, type ReactNode } from "react";
import { jsx, jsxs } from "react/jsx-runtime";

const lowlight = createLowlight({ bash, cpp, css, javascript, json, markdown, python, sql, typescript, xml, yaml });
lowlight.registerAlias({ bash: ["sh", "shell", "console"], xml: ["html", "svg"], javascript: ["js", "jsx"], typescript: ["ts", "tsx"] });

/** Code with its tokens as spans; unchanged in an unknown language. */
export function highlighted(code: string, language: string): ReactNode {
  if (!lowlight.registered(language)) return code;
  return toJsxRuntime(lowlight.highlight(language, code), { Fragment, jsx, jsxs });
}
