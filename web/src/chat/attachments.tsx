import { ImageOff, Play, X } from "lucide-react";
import { useEffect, useState } from "react";
import { bytesOf } from "../api/history";
import { kindOf, newId, type Attachment } from "../state/types";
import { Dialog } from "./dialog";
import { DocumentCard, DocumentPages } from "./document";

/** File types that the file chooser offers; the server may take fewer. */
export const ACCEPTED = [
  "image/png,image/jpeg,image/webp,image/gif,image/bmp,image/avif,image/heic,.heic",
  "video/mp4,video/webm,video/x-msvideo,video/quicktime",
  "application/pdf,.pdf,image/tiff,.tif,.tiff",
].join();

export function imageOf(file: Blob, name: string): Attachment {
  return { id: newId(), name, kind: "image", blob: file };
}

/** Keep images, videos and documents. */
export function attachmentsOf(files: Iterable<File>): Attachment[] {
  return [...files].flatMap((file) => {
    const kind = kindOf(file.name, file.type);
    return kind ? [{ id: newId(), name: file.name || "Image", kind, blob: file }] : [];
  });
}

/** Object URL of an image while it is shown; "" until it is loaded, undefined if it is gone. */
export function useAttachmentUrl(attachment: Attachment): string | undefined {
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

interface Props {
  attachments: Attachment[];
  /** Lets them be changed and taken away again. */
  onChange?: (attachments: Attachment[]) => void;
}

/** Images, videos and documents side by side; each opens in full size. */
export function Attachments({ attachments, onChange }: Props) {
  const [shown, setShown] = useState<Attachment>();
  if (attachments.length === 0) return null;
  return (
    <ul className={onChange ? "attachments small" : "attachments"} aria-label="Files">
      {attachments.map((attachment) => (
        <li key={attachment.id}>
          <button className="attachment" aria-label={`Open ${attachment.name}`} onClick={() => setShown(attachment)} type="button">
            {attachment.kind === "document" ? (
              <DocumentCard document={attachment} pages={onChange ? undefined : attachment.pages} />
            ) : (
              <Shown attachment={attachment} />
            )}
            {attachment.kind === "video" && <Play className="play" aria-hidden />}
          </button>
          {onChange && attachment.kind === "document" && (
            <input
              className="pages"
              aria-label={`Pages of ${attachment.name}`}
              placeholder="All pages"
              title="Such as 1-3,7,10-"
              value={attachment.pages ?? ""}
              onChange={(event) => {
                const changed = { ...attachment, pages: event.target.value || undefined };
                onChange(attachments.map((one) => (one === attachment ? changed : one)));
              }}
            />
          )}
          {onChange && (
            <button
              type="button"
              className="icon remove"
              aria-label={`Remove ${attachment.name}`}
              onClick={() => onChange(attachments.filter((one) => one !== attachment))}
            >
              <X />
            </button>
          )}
        </li>
      ))}
      {shown && (
        <li>
          <Dialog title={shown.name} wide onClose={() => setShown(undefined)}>
            <div className="whole">{shown.kind === "document" ? <DocumentPages document={shown} /> : <Shown attachment={shown} controls />}</div>
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
