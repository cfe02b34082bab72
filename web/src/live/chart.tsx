import { useEffect, useRef, useState } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { SPAN, type Sample } from "./figures";

type Field = Exclude<keyof Sample, "time">;

interface Props {
  title: string;
  /** A line of the chart: its field, name, and the CSS variable of its colour. */
  lines: { field: Field; label: string; colour: string }[];
  samples: readonly Sample[];
  format: (value: number) => string;
}

const HEIGHT = 160;
const SHORT = 60;

/** The last minutes of some figures. The words below it say the same for who cannot see it. */
export function Chart({ title, lines, samples, format }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot>(undefined);
  const theme = useThemeChanges();
  const latest = samples.at(-1);

  useEffect(() => {
    const element = place.current!;
    const made = new uPlot(options(element, lines, format), dataOf(lines, samples), element);
    plot.current = made;
    const resizing = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: HEIGHT }));
    resizing.observe(element);
    return () => {
      resizing.disconnect();
      made.destroy();
    };
    // Made anew for other colours only; what is new is put into it below.
  }, [theme]);
  useEffect(() => plot.current?.setData(dataOf(lines, samples)), [samples]);

  const words = lines.map(({ field, label }) => `${label} ${show(latest?.[field], format)}, at most ${show(most(samples, field), format)}`);
  return (
    <figure className="panel">
      <figcaption>
        <h2>{title}</h2>
        <ul className="legend">
          {lines.map(({ field, label, colour }) => (
            <li key={field}>
              <i className={colour} aria-hidden /> {label} <b>{show(latest?.[field], format)}</b>
            </li>
          ))}
        </ul>
      </figcaption>
      <div ref={place} className="plot" role="img" aria-label={`${title} in the last minutes: ${words.join("; ")}`} />
    </figure>
  );
}

function show(value: number | null | undefined, format: (value: number) => string): string {
  return value === null || value === undefined ? "–" : format(value);
}

function most(samples: readonly Sample[], field: Field): number | null {
  return samples.reduce<number | null>((top, sample) => (sample[field] === null ? top : Math.max(top ?? 0, sample[field])), null);
}

function dataOf(lines: Props["lines"], samples: readonly Sample[]): uPlot.AlignedData {
  const now = samples.at(-1)?.time ?? 0;
  return [samples.map((sample) => sample.time - now), ...lines.map(({ field }) => samples.map((sample) => sample[field]))];
}

function options(element: HTMLElement, lines: Props["lines"], format: (value: number) => string): uPlot.Options {
  const style = getComputedStyle(element);
  const colour = (name: string) => style.getPropertyValue(`--${name}`).trim();
  const axis = { stroke: colour("muted"), font: `12px ${style.fontFamily}`, grid: { stroke: colour("line"), width: 1 }, ticks: { show: false, size: 0 } };
  return {
    width: element.clientWidth,
    height: HEIGHT,
    cursor: { show: false },
    legend: { show: false },
    padding: [6, 18, 0, 0],
    scales: { x: { time: false, range: (plot) => [-spanOf(plot.data[0]), 0] }, y: { range: (_plot, _least, top) => [0, Math.max(1, (top ?? 0) * 1.15)] } },
    axes: [
      { ...axis, size: 24, splits: (plot) => ticks(spanOf(plot.data[0])), values: (_plot, splits) => splits.map(ago) },
      { ...axis, size: 52, space: 40, values: (_plot, splits) => splits.map((value) => (Number.isInteger(value) ? format(value) : "")) },
    ],
    series: [
      {},
      ...lines.map(({ colour: name }) => ({ stroke: colour(name), width: 2, fill: `${colour(name)}1f`, points: { show: false } })),
    ],
  };
}

/** How many seconds are shown: one minute as long as that is enough. */
function spanOf(ages: ArrayLike<number>): number {
  return (ages[0] ?? 0) < -SHORT ? SPAN : SHORT;
}

function ticks(span: number): number[] {
  const step = span === SPAN ? 60 : 15;
  return Array.from({ length: span / step + 1 }, (_, index) => index * step - span);
}

function ago(seconds: number): string {
  if (seconds === 0) return "now";
  return seconds % 60 ? `${seconds} s` : `${seconds / 60} min`;
}

/** A number that changes with the colours of the page. */
function useThemeChanges(): number {
  const [changes, setChanges] = useState(0);
  useEffect(() => {
    const themes = new MutationObserver(() => setChanges((number) => number + 1));
    themes.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => themes.disconnect();
  }, []);
  return changes;
}
