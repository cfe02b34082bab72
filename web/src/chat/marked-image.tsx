import { useState } from "react";
import type { Attachment, ImageSize } from "../state/types";
import { useAttachmentUrl } from "./attachments";
import { placeIn, unitOf, viewOf, type Mark, type Unit } from "./marks";

const UNITS: Record<Unit, string> = { pixels: "pixels", thousandths: "thousandths", shares: "shares of 1" };
const COLOURS = 6;

interface Props {
  images: Attachment[];
  /** The part of each image that the model saw, if known. */
  sizes?: ImageSize[];
  marks: Mark[];
  model?: string;
}

/** An answer's marks, drawn on their image. */
export function MarkedImage({ images, sizes, marks, model }: Props) {
  const [number, setNumber] = useState(0);
  const [chosen, setChosen] = useState<Unit>();
  const [size, setSize] = useState<[number, number]>();
  const image = images[number] ?? images[0]!;
  const url = useAttachmentUrl(image);
  if (!url) return null;
  const view = size && viewOf(...size, sizes?.[images.indexOf(image)]);
  const unit = chosen ?? (view ? unitOf(marks, view, model) : "pixels");
  const labels = [...new Set(marks.map((mark) => mark.label))];
  return (
    <figure className="marked">
      <div className="ground" role="img" aria-label={`${image.name} with ${labels.filter(Boolean).join(", ") || `${marks.length} marks`}`}>
        <img
          src={url}
          alt=""
          onLoad={({ currentTarget }) => setSize([currentTarget.naturalWidth, currentTarget.naturalHeight])}
        />
        {view && marks.map((mark, index) => <Drawn key={index} mark={mark} place={placeIn(mark, unit, view)} colour={labels.indexOf(mark.label) % COLOURS} />)}
      </div>
      <figcaption>
        {images.length > 1 && (
          <label>
            Image
            <select value={number} onChange={(event) => setNumber(Number(event.target.value))}>
              {images.map((one, index) => (
                <option key={one.id} value={index}>
                  {index + 1}
                </option>
              ))}
            </select>
          </label>
        )}
        {marks.some((mark) => !mark.unit) && (
          <label>
            Coordinates in
            <select value={unit} onChange={(event) => setChosen(event.target.value as Unit)}>
              {(Object.keys(UNITS) as Unit[]).map((one) => (
                <option key={one} value={one}>
                  {UNITS[one]}
                </option>
              ))}
            </select>
          </label>
        )}
      </figcaption>
    </figure>
  );
}

function Drawn({ mark, place, colour }: { mark: Mark; place: number[]; colour: number }) {
  const percent = (share: number) => `${share * 100}%`;
  const [left, top, right = left, bottom = top] = place as [number, number, number?, number?];
  const style = { left: percent(left), top: percent(top), width: percent(right - left), height: percent(bottom - top) };
  const kind = mark.at.length === 2 ? "point" : "area";
  const sides = `${top < 0.08 ? " at-top" : ""}${left > 0.5 ? " at-right" : ""}`;
  return (
    <span className={`mark colour-${colour} ${kind}${sides}`} style={style}>
      {mark.label && <span className="label">{mark.label}</span>}
    </span>
  );
}
