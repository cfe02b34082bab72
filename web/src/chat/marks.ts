/** Boxes and points in answers, in the ways in which models write them. */

import type { ImageSize } from "../state/types";
import { isObject, parseJson, type Json, type JsonObject } from "./json";

/** The unit of coordinates: pixels of the image, or shares of its width and height. */
export type Unit = "pixels" | "thousandths" | "shares";

export interface Mark {
  label: string;
  /** [x, y] of a point, or [left, top, right, bottom] of a box. */
  at: number[];
  /** The unit, if the notation says it. */
  unit?: Unit;
}

/** The model's view: its size in pixels, and its part of the image as shares (left, top, right, bottom). */
export interface View {
  width: number;
  height: number;
  part: [number, number, number, number];
}

const MOST = 200;
const BOXES = ["bbox_2d", "bbox", "box", "bounding_box"];
const POINTS = ["point_2d", "point"];
const SIDES = ["x_min", "y_min", "x_max", "y_max"];
const LABELS = ["label", "name", "category", "class", "text_content", "text", "description"];
/** Models whose JSON has thousandths. */
const IN_THOUSANDTHS = /qwen-?(2-?vl|3)/i;
const FENCED = /```json\s*\n([\s\S]*?)```/g;

const NUMBER = String.raw`\s*(\d+(?:\.\d+)?)\s*`;
/** PaliGemma: top, left, bottom and right, in parts of 1,024. */
const LOCATIONS = /<loc(\d{4})><loc(\d{4})><loc(\d{4})><loc(\d{4})>\s*([^<;\n]*)/g;
/** Qwen-VL, InternVL and DeepSeek-VL, which may name what is in a box in front of it. */
const TAGGED = new RegExp(
  String.raw`(?:<(?:ref|\|ref\|)>([^<]*)</?\|?/?ref\|?>\s*)?<(?:box|\|det\|)>\s*[[(]{1,2}${NUMBER},${NUMBER}(?:,|\)\s*,\s*\()${NUMBER},${NUMBER}[\])]{1,2}`,
  "g",
);
/** Molmo: points in percent. */
const POINTED = /<points?\s+([^>]*)>([^<]*)/g;

/** All that an answer marks, up to what an image has room for. */
export function marksIn(text: string): Mark[] {
  const blocks = [...text.matchAll(FENCED)].map((match) => match[1]!);
  const values = [text, ...blocks].flatMap((block) => parseJson(block) ?? []);
  return [...values.flatMap(inJson), ...inTags(text)].slice(0, MOST);
}

/** The model's view of an image of this size; the whole image if the server does not say. */
export function viewOf(width: number, height: number, seen?: ImageSize): View {
  if (!seen?.model_width || !seen.model_height) return { width, height, part: [0, 0, 1, 1] };
  const [left, top, right, bottom] = seen.box ?? [0, 0, seen.width, seen.height];
  const part: View["part"] = [left / seen.width, top / seen.height, right / seen.width, bottom / seen.height];
  return { width: seen.model_width, height: seen.model_height, part };
}

/** The unit of coordinates whose notation has none. model: the author, if known. */
export function unitOf(marks: Mark[], { width, height }: View, model = ""): Unit {
  const open = marks.filter((mark) => !mark.unit);
  if (open.every(({ at }) => at.every((value) => value <= 1))) return "shares";
  if (IN_THOUSANDTHS.test(model)) return "thousandths";
  return open.every(({ at }) => at.every((value, index) => value <= (index % 2 ? height : width))) ? "pixels" : "thousandths";
}

/** The place of a mark in the image, as shares of its width and height. */
export function placeIn(mark: Mark, unit: Unit, { width, height, part }: View): number[] {
  const own = mark.unit ?? unit;
  const whole = own === "pixels" ? [width, height] : own === "thousandths" ? [1000, 1000] : [1, 1];
  return mark.at.map((value, index) => {
    const [from, to] = index % 2 ? [part[1], part[3]] : [part[0], part[2]];
    return Math.min(Math.max(from + (value / whole[index % 2]!) * (to - from), 0), 1);
  });
}

function inJson(value: Json): Mark[] {
  if (Array.isArray(value)) return value.flatMap(inJson);
  if (!isObject(value)) return [];
  const mark = markOf(value);
  return mark ? [mark] : Object.values(value).flatMap(inJson);
}

function markOf(value: JsonObject): Mark | undefined {
  const label = LABELS.map((name) => value[name]).find((found) => typeof found === "string") ?? "";
  const named = (names: string[], size: number) => names.map((name) => numbers(value[name], size)).find(Boolean);
  const box = named(BOXES, 4);
  if (box) return boxOf(label, box);
  const turned = numbers(value.box_2d, 4); // as Gemini and Gemma write it: top, left, bottom, right
  if (turned) return boxOf(label, [turned[1]!, turned[0]!, turned[3]!, turned[2]!], "thousandths");
  const sides = numbers(SIDES.map((name) => value[name] ?? null), 4);
  if (sides) return boxOf(label, sides);
  const at = named(POINTS, 2) ?? numbers([value.x ?? null, value.y ?? null], 2);
  return at && { label, at };
}

function inTags(text: string): Mark[] {
  const located = [...text.matchAll(LOCATIONS)].map((match) => {
    const [top, left, bottom, right] = match.slice(1, 5).map((part) => Number(part) / 1024);
    return boxOf(match[5]!.trim(), [left!, top!, right!, bottom!], "shares");
  });
  const tagged = [...text.matchAll(TAGGED)].map((match) => boxOf((match[1] ?? "").trim(), match.slice(2, 6).map(Number), "thousandths"));
  const pointed = [...text.matchAll(POINTED)].flatMap(([, attributes, label]): Mark[] => {
    const [xs, ys] = ["x", "y"].map((axis) => [...attributes!.matchAll(new RegExp(`\\b${axis}\\d*="\\s*([\\d.]+)"`, "g"))].map((one) => Number(one[1]) / 100));
    return xs!.slice(0, ys!.length).map((x, index) => ({ label: label!.trim(), at: [x, ys![index]!], unit: "shares" }));
  });
  return [...located, ...tagged, ...pointed].filter((mark): mark is Mark => mark !== undefined);
}

/** Undefined if it has no inside. */
function boxOf(label: string, at: number[], unit?: Unit): Mark | undefined {
  return at[0]! < at[2]! && at[1]! < at[3]! ? { label, at, unit } : undefined;
}

function numbers(value: Json | undefined, size: number): number[] | undefined {
  const good = Array.isArray(value) && value.length === size && value.every((one) => typeof one === "number" && one >= 0);
  return good ? (value as number[]) : undefined;
}
