import { Brush, Eraser, Lasso, Undo2 } from "lucide-react";
import { useEffect, useRef, useState, type ReactNode } from "react";
import type { Attachment } from "../state/types";
import { Dialog } from "./dialog";
import { COLOURS, describe, outline, paint, placeOf, SHAPES, SIDE, type Colour, type Mark, type Point, type Shape } from "./drawing";
import { imageOf } from "./attachments";

type Tool = Shape | "line" | "area";

interface Props {
  onClose: () => void;
  onAdd: (attachment: Attachment) => void;
  onAsk: (attachment: Attachment, question: string) => void;
}

const QUESTIONS = ["What is in the image?", "How many shapes are there?"];
const SIZES = { small: 72, medium: 120, large: 200 } as const;
const STEP = 24;

/** A sheet to draw on: shapes with a click, lines and filled areas by hand, all of it by keyboard, too. */
export function DrawDialog({ onClose, onAdd, onAsk }: Props) {
  const [tool, setTool] = useState<Tool>("circle");
  const [colour, setColour] = useState<Colour>("red");
  const [size, setSize] = useState<keyof typeof SIZES>("medium");
  const [background, setBackground] = useState<Colour>("white");
  const [marks, setMarks] = useState<readonly Mark[]>([]);
  const canvas = useRef<HTMLCanvasElement>(null);
  const empty = marks.length === 0;

  useEffect(() => paint(canvas.current!.getContext("2d")!, background, marks), [background, marks]);

  function withAttachment(then: (attachment: Attachment) => void): void {
    canvas.current!.toBlob((blob) => blob && then(imageOf(blob, "Drawing.png")), "image/png");
  }

  return (
    <Dialog title="Draw an image" wide onClose={onClose}>
      <div className="draw">
        <Sheet
          canvas={canvas}
          description={describe(background, marks)}
          begin={(at) => {
            if (tool === "line") return { kind: "line", colour, points: [at], size: SIZES[size] / 6 };
            if (tool === "area") return { kind: "area", colour, points: [at] };
            return { kind: "stamp", shape: tool, colour, at, size: SIZES[size] };
          }}
          onMark={(mark) => setMarks((before) => [...before, mark])}
          onGrow={(at) => setMarks((before) => grown(before, at))}
        />
        <div className="palette">
          <Options label="Shape">
            {SHAPES.map((shape) => (
              <Option key={shape} label={shape} chosen={tool === shape} onChoose={() => setTool(shape)}>
                <ShapeIcon shape={shape} />
              </Option>
            ))}
            <Option label="Line by hand" chosen={tool === "line"} onChoose={() => setTool("line")}>
              <Brush />
            </Option>
            <Option label="Filled area by hand" chosen={tool === "area"} onChoose={() => setTool("area")}>
              <Lasso />
            </Option>
          </Options>
          <Options label="Colour">
            <Swatches chosen={colour} onChoose={setColour} />
          </Options>
          <Options label="Size">
            {(Object.keys(SIZES) as (keyof typeof SIZES)[]).map((name) => (
              <Option key={name} label={name} chosen={size === name} onChoose={() => setSize(name)}>
                <span className={`dot ${name}`} />
              </Option>
            ))}
          </Options>
          <Options label="Sheet">
            <Swatches chosen={background} onChoose={setBackground} />
          </Options>
          <div className="buttons">
            <button type="button" disabled={empty} onClick={() => setMarks(marks.slice(0, -1))}>
              <Undo2 aria-hidden /> Undo
            </button>
            <button type="button" disabled={empty} onClick={() => setMarks([])}>
              <Eraser aria-hidden /> Clear
            </button>
          </div>
        </div>
      </div>
      <div className="buttons end" role="group" aria-label="Actions for the drawing">
        <button type="button" disabled={empty} onClick={() => withAttachment(onAdd)}>
          Other question
        </button>
        {QUESTIONS.map((question) => (
          <button key={question} type="button" className="primary" disabled={empty} onClick={() => withAttachment((attachment) => onAsk(attachment, question))}>
            {question}
          </button>
        ))}
      </div>
    </Dialog>
  );
}

function grown(marks: readonly Mark[], at: Point): readonly Mark[] {
  const last = marks.at(-1);
  if (!last || last.kind === "stamp") return marks;
  return [...marks.slice(0, -1), { ...last, points: [...last.points, at] }];
}

interface SheetProps {
  canvas: React.RefObject<HTMLCanvasElement | null>;
  description: string;
  begin: (at: Point) => Mark;
  onMark: (mark: Mark) => void;
  onGrow: (at: Point) => void;
}

function Sheet({ canvas, description, begin, onMark, onGrow }: SheetProps) {
  const [cross, setCross] = useState<Point>([SIDE / 2, SIDE / 2]);
  const [focused, setFocused] = useState(false);
  const drawing = useRef(false);

  function pointOf(event: React.PointerEvent): Point {
    const box = canvas.current!.getBoundingClientRect();
    return [((event.clientX - box.left) * SIDE) / box.width, ((event.clientY - box.top) * SIDE) / box.height];
  }

  function press(event: React.KeyboardEvent): void {
    const move = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] }[event.key];
    if (move) setCross(([x, y]) => [clamped(x + move[0]!), clamped(y + move[1]!)]);
    else if (event.key === "Enter" || event.key === " ") onMark(begin(cross));
    else return;
    event.preventDefault();
  }

  return (
    <div>
      <div className="sheet">
        <canvas
          ref={canvas}
          width={SIDE}
          height={SIDE}
          tabIndex={0}
          role="application"
          aria-roledescription="drawing"
          aria-label="Sheet to draw on"
          aria-describedby="sheet-help"
          onKeyDown={press}
          onFocus={(event) => setFocused(event.target.matches(":focus-visible"))}
          onBlur={() => setFocused(false)}
          onPointerDown={(event) => {
            if (event.button !== 0) return;
            event.currentTarget.setPointerCapture(event.pointerId);
            drawing.current = true;
            onMark(begin(pointOf(event)));
          }}
          onPointerMove={(event) => drawing.current && onGrow(pointOf(event))}
          onPointerUp={() => (drawing.current = false)}
          onPointerCancel={() => (drawing.current = false)}
        />
        {focused && <span className="cross" style={{ left: `${(100 * cross[0]) / SIDE}%`, top: `${(100 * cross[1]) / SIDE}%` }} />}
      </div>
      <p className="hint" id="sheet-help">
        Click or touch the sheet. <span className="fine-only">By keyboard: arrows move the cross, Enter draws.</span>
      </p>
      <p className="visually-hidden" aria-live="polite">
        {focused ? `Cross at the ${placeOf(cross)}. ` : ""}
        {description}
      </p>
    </div>
  );
}

function clamped(value: number): number {
  return Math.min(SIDE, Math.max(0, value));
}

function Options({ label, children }: { label: string; children: ReactNode }) {
  return (
    <div className="options" role="group" aria-label={label}>
      <span aria-hidden>{label}</span>
      <div>{children}</div>
    </div>
  );
}

function Option({ label, chosen, onChoose, children }: { label: string; chosen: boolean; onChoose: () => void; children: ReactNode }) {
  return (
    <button type="button" className="option" aria-label={label} title={label} aria-pressed={chosen} onClick={onChoose}>
      {children}
    </button>
  );
}

function Swatches({ chosen, onChoose }: { chosen: Colour; onChoose: (colour: Colour) => void }) {
  return (Object.keys(COLOURS) as Colour[]).map((name) => (
    <Option key={name} label={name} chosen={chosen === name} onChoose={() => onChoose(name)}>
      <span className="swatch" style={{ background: COLOURS[name] }} />
    </Option>
  ));
}

function ShapeIcon({ shape }: { shape: Shape }) {
  if (shape === "circle" || shape === "ring") {
    return (
      <svg viewBox="-12 -12 24 24" aria-hidden>
        <circle r={shape === "ring" ? 7 : 8.5} fill={shape === "ring" ? "none" : "currentColor"} stroke="currentColor" strokeWidth={shape === "ring" ? 3 : 0} />
      </svg>
    );
  }
  const points = outline(shape).map(([x, y]) => `${x * 9},${y * 9}`);
  return (
    <svg viewBox="-12 -12 24 24" aria-hidden>
      <polygon points={points.join(" ")} fill="currentColor" />
    </svg>
  );
}
