import { useEffect, useRef } from "react";
import { count, percent } from "../format";
import type { Blocks } from "./figures";

/** Pixels of a cell with the gap beside it: as large as the image may be high. */
const CELLS = [10, 26] as const;
const HEIGHT = 220;
const GAP = 2;
const FAINTEST = 0.4;

/** The KV cache as an image: a square for each block, or for several where there are many. */
export function BlockMap({ blocks }: { blocks: Blocks | null }) {
  const place = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const draw = () => blocks && paint(canvas.current!, place.current!, blocks);
    draw();
    const resizing = new ResizeObserver(draw);
    resizing.observe(place.current!);
    return () => resizing.disconnect();
  }, [blocks]);
  const text = blocks ? inWords(blocks) : "No data from the engine yet.";
  return (
    <figure className="panel map">
      <figcaption>
        <h2>KV blocks</h2>
        <ul className="legend">
          <li>
            <i className="held" aria-hidden /> held by a request
          </li>
          <li>
            <i className="shared" aria-hidden /> by several
          </li>
          <li>
            <i className="cached" aria-hidden /> cached
          </li>
          <li>
            <i className="free" aria-hidden /> free
          </li>
        </ul>
      </figcaption>
      <div ref={place}>
        <canvas ref={canvas} role="img" aria-label={`Map of the KV cache. ${text}`} />
      </div>
      <p className="hint">{text}</p>
    </figure>
  );
}

function sum(values: number[]): number {
  return values.reduce((total, value) => total + value, 0);
}

export function inWords({ num_blocks, blocks_per_cell, held, cached, holders }: Blocks): string {
  const inUse = sum(held);
  const kept = sum(cached);
  const shared = holders.reduce((top, value) => Math.max(top, value), 0);
  const parts = [
    `${count(inUse)} of ${count(num_blocks)} blocks held (${percent(inUse, num_blocks)})`,
    `${count(kept)} cached, to be found again`,
    `${count(num_blocks - inUse - kept)} free`,
  ];
  if (shared > 1) parts.push(`up to ${count(shared)} requests share one`);
  return `${parts.join(" · ")}. A square is ${blocks_per_cell === 1 ? "a block" : `${count(blocks_per_cell)} blocks`}.`;
}

function paint(canvas: HTMLCanvasElement, place: HTMLElement, blocks: Blocks): void {
  const cell = Math.min(CELLS[1], Math.max(CELLS[0], Math.floor(Math.sqrt((place.clientWidth * HEIGHT) / blocks.held.length))));
  const columns = Math.max(1, Math.floor(place.clientWidth / cell));
  const rows = Math.ceil(blocks.held.length / columns);
  const scale = devicePixelRatio;
  canvas.width = columns * cell * scale;
  canvas.height = rows * cell * scale;
  canvas.style.width = `${columns * cell}px`;
  canvas.style.height = `${rows * cell}px`;
  const context = canvas.getContext("2d")!;
  context.scale(scale, scale);
  const style = getComputedStyle(canvas);
  const colours = ["free", "cached", "held", "shared"].map((name) => style.getPropertyValue(`--block-${name}`).trim());
  blocks.held.forEach((held, index) => {
    const cached = blocks.cached[index]!;
    const box = [(index % columns) * cell, Math.floor(index / columns) * cell, cell - GAP, cell - GAP] as const;
    context.globalAlpha = 1;
    context.fillStyle = colours[0]!;
    context.fillRect(...box);
    if (held + cached === 0) return;
    // A few blocks among many must be seen as well.
    context.globalAlpha = FAINTEST + (1 - FAINTEST) * Math.min(1, (held + cached) / blocks.blocks_per_cell);
    context.fillStyle = colours[held === 0 ? 1 : blocks.holders[index]! > 1 ? 3 : 2]!;
    context.fillRect(...box);
  });
}
