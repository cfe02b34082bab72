import { ImageOff, X } from "lucide-react";
import { useEffect, useState } from "react";
import { download } from "../api/history";
import { newId, type Picture } from "../state/types";
import { Dialog } from "./dialog";

/** What the file chooser offers; the server says what it really takes. */
export const ACCEPTED = "image/png,image/jpeg,image/webp,image/gif,image/bmp,image/tiff,video/mp4,video/webm,video/x-msvideo,video/quicktime";

const downloads = new Map<string, Promise<Blob>>();

export function pictureOf(file: Blob, name: string): Picture {
  return { id: newId(), name, kind: file.type.startsWith("video/") ? "video" : "image", blob: file };
}

/** Those of some files that are pictures or videos. */
export function picturesOf(files: Iterable<File>): Picture[] {
  return [...files].filter((file) => /^(image|video)\//.test(file.type)).map((file) => pictureOf(file, file.name || "Picture"));
}

/** An address of a picture for as long as it is shown; "" until it is there, undefined if it is gone. */
function usePictureUrl(picture: Picture): string | undefined {
  const [url, setUrl] = useState<string | undefined>("");
  useEffect(() => {
    let made: string | undefined;
    let gone = false;
    bytesOf(picture).then(
      (blob) => {
        if (!gone) setUrl((made = URL.createObjectURL(blob)));
      },
      () => setUrl(undefined),
    );
    return () => {
      gone = true;
      if (made) URL.revokeObjectURL(made);
    };
  }, [picture.blob, picture.fileId]);
  return url;
}

function bytesOf(picture: Picture): Promise<Blob> {
  if (picture.blob) return Promise.resolve(picture.blob);
  const known = downloads.get(picture.fileId!) ?? download(picture.fileId!);
  downloads.set(picture.fileId!, known);
  known.catch(() => downloads.delete(picture.fileId!)); // it may be there the next time
  return known;
}

interface Props {
  pictures: Picture[];
  /** Lets pictures be taken away again. */
  onRemove?: (id: string) => void;
}

/** Pictures side by side; each opens in full size. */
export function Pictures({ pictures, onRemove }: Props) {
  const [shown, setShown] = useState<Picture>();
  if (pictures.length === 0) return null;
  return (
    <ul className={onRemove ? "pictures small" : "pictures"} aria-label="Pictures">
      {pictures.map((picture) => (
        <li key={picture.id}>
          <button className="picture" aria-label={`Open ${picture.name}`} onClick={() => setShown(picture)} type="button">
            <Shown picture={picture} />
          </button>
          {onRemove && (
            <button type="button" className="icon remove" aria-label={`Remove ${picture.name}`} onClick={() => onRemove(picture.id)}>
              <X />
            </button>
          )}
        </li>
      ))}
      {shown && (
        <li>
          <Dialog title={shown.name} wide onClose={() => setShown(undefined)}>
            <div className="whole">
              <Shown picture={shown} controls />
            </div>
          </Dialog>
        </li>
      )}
    </ul>
  );
}

function Shown({ picture, controls }: { picture: Picture; controls?: boolean }) {
  const url = usePictureUrl(picture);
  const [broken, setBroken] = useState(false);
  if (url === undefined || broken) {
    return (
      <span className="missing">
        <ImageOff aria-hidden /> {url === undefined ? "Not there any more" : "Cannot be shown here"}
      </span>
    );
  }
  if (url === "") return <span className="missing" aria-busy="true" />;
  if (picture.kind === "video") return <video src={url} controls={controls} muted onError={() => setBroken(true)} />;
  return <img src={url} alt={picture.name} onError={() => setBroken(true)} />;
}
