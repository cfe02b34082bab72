import { ImageOff, X } from "lucide-react";
import { useEffect, useState } from "react";
import { download } from "../api/history";
import { newId, type Attachment } from "../state/types";
import { Dialog } from "./dialog";

/** What the file chooser offers; the server says what it really takes. */
export const ACCEPTED = "image/png,image/jpeg,image/webp,image/gif,image/bmp,image/tiff,video/mp4,video/webm,video/x-msvideo,video/quicktime";

const downloads = new Map<string, Promise<Blob>>();

export function attachmentOf(file: Blob, name: string): Attachment {
  return { id: newId(), name, kind: file.type.startsWith("video/") ? "video" : "image", blob: file };
}

/** Those of some files that are images or videos. */
export function attachmentsOf(files: Iterable<File>): Attachment[] {
  return [...files].filter((file) => /^(image|video)\//.test(file.type)).map((file) => attachmentOf(file, file.name || "Image"));
}

/** An address of an image for as long as it is shown; "" until it is there, undefined if it is gone. */
function useAttachmentUrl(attachment: Attachment): string | undefined {
  const [url, setUrl] = useState<string | undefined>("");
  useEffect(() => {
    let made: string | undefined;
    let gone = false;
    bytesOf(attachment).then(
      (blob) => {
        if (!gone) setUrl((made = URL.createObjectURL(blob)));
      },
      () => setUrl(undefined),
    );
    return () => {
      gone = true;
      if (made) URL.revokeObjectURL(made);
    };
  }, [attachment.blob, attachment.fileId]);
  return url;
}

function bytesOf(attachment: Attachment): Promise<Blob> {
  if (attachment.blob) return Promise.resolve(attachment.blob);
  const known = downloads.get(attachment.fileId!) ?? download(attachment.fileId!);
  downloads.set(attachment.fileId!, known);
  known.catch(() => downloads.delete(attachment.fileId!)); // it may be there the next time
  return known;
}

interface Props {
  attachments: Attachment[];
  /** Lets images be taken away again. */
  onRemove?: (id: string) => void;
}

/** Images side by side; each opens in full size. */
export function Attachments({ attachments, onRemove }: Props) {
  const [shown, setShown] = useState<Attachment>();
  if (attachments.length === 0) return null;
  return (
    <ul className={onRemove ? "attachments small" : "attachments"} aria-label="Images">
      {attachments.map((attachment) => (
        <li key={attachment.id}>
          <button className="attachment" aria-label={`Open ${attachment.name}`} onClick={() => setShown(attachment)} type="button">
            <Shown attachment={attachment} />
          </button>
          {onRemove && (
            <button type="button" className="icon remove" aria-label={`Remove ${attachment.name}`} onClick={() => onRemove(attachment.id)}>
              <X />
            </button>
          )}
        </li>
      ))}
      {shown && (
        <li>
          <Dialog title={shown.name} wide onClose={() => setShown(undefined)}>
            <div className="whole">
              <Shown attachment={shown} controls />
            </div>
          </Dialog>
        </li>
      )}
    </ul>
  );
}

function Shown({ attachment, controls }: { attachment: Attachment; controls?: boolean }) {
  const url = useAttachmentUrl(attachment);
  const [broken, setBroken] = useState(false);
  if (url === undefined || broken) {
    return (
      <span className="missing">
        <ImageOff aria-hidden /> {url === undefined ? "No longer available" : "Cannot be shown here"}
      </span>
    );
  }
  if (url === "") return <span className="missing" aria-busy="true" />;
  if (attachment.kind === "video") return <video src={url} controls={controls} muted onError={() => setBroken(true)} />;
  return <img src={url} alt={attachment.name} onError={() => setBroken(true)} />;
}
