/** The marks of a drawing, and how to paint them. Lengths are in pixels of the image. */

import { newId, type Attachment } from "../state/types";

export const SIDE = 432;

export const COLOURS = {
  red: "#e02020",
  orange: "#ff8c00",
  yellow: "#ffd700",
  green: "#20a020",
  blue: "#2040e0",
  purple: "#8020c0",
  pink: "#ff80c0",
  brown: "#8b4513",
  black: "#101010",
  white: "#ffffff",
} as const;

export type Colour = keyof typeof COLOURS;

export const SHAPES = ["circle", "square", "triangle", "star", "heart", "diamond", "cross", "ring"] as const;
export type Shape = (typeof SHAPES)[number];

export type Point = [x: number, y: number];

export type Mark =
  | { kind: "stamp"; shape: Shape; colour: Colour; at: Point; size: number }
  | { kind: "line"; colour: Colour; points: Point[]; size: number }
  | { kind: "area"; colour: Colour; points: Point[] };

const SAMPLE: readonly Mark[] = [
  { kind: "stamp", shape: "circle", colour: "red", at: [0.28 * SIDE, 0.3 * SIDE], size: SIDE / 3 },
  { kind: "stamp", shape: "star", colour: "blue", at: [0.7 * SIDE, 0.65 * SIDE], size: SIDE / 3 },
];

/** Paint all of a drawing. */
export function paint(canvas: CanvasRenderingContext2D, background: Colour, marks: readonly Mark[]): void {
  canvas.fillStyle = COLOURS[background];
  canvas.fillRect(0, 0, SIDE, SIDE);
  for (const mark of marks) {
    canvas.fillStyle = canvas.strokeStyle = COLOURS[mark.colour];
    if (mark.kind === "stamp") paintStamp(canvas, mark.shape, mark.at, mark.size);
    else paintPoints(canvas, mark.points, mark.kind === "line" ? mark.size : 3, mark.kind === "area");
  }
}

/** An image to try the model on. */
export async function sample(): Promise<Attachment> {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = SIDE;
  paint(canvas.getContext("2d")!, "white", SAMPLE);
  const blob = await new Promise<Blob | null>((resolve) => canvas.toBlob(resolve, "image/png"));
  return { id: newId(), name: "Sample.png", kind: "image", blob: blob! };
}

function paintPoints(canvas: CanvasRenderingContext2D, points: readonly Point[], width: number, filled: boolean): void {
  canvas.lineWidth = width;
  canvas.lineCap = canvas.lineJoin = "round";
  canvas.beginPath();
  points.forEach(([x, y], index) => (index ? canvas.lineTo(x, y) : canvas.moveTo(x, y)));
  if (points.length === 1) canvas.lineTo(points[0]![0], points[0]![1]);
  if (filled) {
    canvas.closePath();
    canvas.fill();
  }
  canvas.stroke();
}

function paintStamp(canvas: CanvasRenderingContext2D, shape: Shape, [x, y]: Point, size: number): void {
  const radius = size / 2;
  canvas.beginPath();
  if (shape === "circle") canvas.arc(x, y, radius, 0, 2 * Math.PI);
  else if (shape === "ring") {
    canvas.lineWidth = size * 0.15;
    canvas.arc(x, y, radius * 0.85, 0, 2 * Math.PI);
    canvas.stroke();
    return;
  } else {
    for (const [px, py] of outline(shape)) canvas.lineTo(x + px * radius, y + py * radius);
    canvas.closePath();
  }
  canvas.fill();
}

/** The corners of a shape inside the square from -1 to 1. */
export function outline(shape: Exclude<Shape, "circle" | "ring">): Point[] {
  switch (shape) {
    case "square":
      return [[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]];
    case "triangle":
      return [[0, -1], [1, 0.9], [-1, 0.9]];
    case "diamond":
      return [[0, -1], [0.8, 0], [0, 1], [-0.8, 0]];
    case "cross":
      return [[-0.3, -1], [0.3, -1], [0.3, -0.3], [1, -0.3], [1, 0.3], [0.3, 0.3], [0.3, 1], [-0.3, 1], [-0.3, 0.3], [-1, 0.3], [-1, -0.3], [-0.3, -0.3]];
    case "star":
      return Array.from({ length: 10 }, (_, index): Point => {
        const radius = index % 2 ? 0.42 : 1;
        return [radius * Math.sin((index * Math.PI) / 5), -radius * Math.cos((index * Math.PI) / 5)];
      });
    case "heart":
      return Array.from({ length: 60 }, (_, index): Point => {
        const t = (index * Math.PI) / 30;
        const height = 13 * Math.cos(t) - 5 * Math.cos(2 * t) - 2 * Math.cos(3 * t) - Math.cos(4 * t);
        return [Math.sin(t) ** 3, -(height + 2.5) / 14.5];
      });
  }
}

/** In which of nine places a point is. */
export function placeOf([x, y]: Point): string {
  const row = ["top", "middle", "bottom"][Math.min(2, Math.floor((3 * y) / SIDE))]!;
  const column = ["left", "middle", "right"][Math.min(2, Math.floor((3 * x) / SIDE))]!;
  return row === column ? "middle" : `${row} ${column}`;
}

/** A drawing in words, for whoever cannot see it. */
export function describe(background: Colour, marks: readonly Mark[]): string {
  if (marks.length === 0) return `Nothing on ${background} yet.`;
  const parts = marks.map((mark) => {
    if (mark.kind === "stamp") return `a ${mark.colour} ${mark.shape} at the ${placeOf(mark.at)}`;
    return mark.kind === "line" ? `a ${mark.colour} line` : `a ${mark.colour} area`;
  });
  return `On ${background}: ${parts.join(", ")}.`;
}
