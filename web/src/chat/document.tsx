import { FileText } from "lucide-react";
import { useEffect, useState } from "react";
import { previews, type Previews } from "../api/documents";
import { count, plural } from "../format";
import type { Attachment } from "../state/types";
import { useAttachmentUrl } from "./attachments";

const AT_A_TIME = 12;

/** A document's first page, name and number of pages. pages: the pages to send, if shown. */
export function DocumentCard({ document, pages }: { document: Attachment; pages?: string }) {
  const [first] = usePreviews(document, 1);
  const page = first?.pages[0];
  const all = first && plural(first.numPages, "page");
  return (
    <span className="sheet">
      {page ? <img src={page.image} width={page.width} height={page.height} alt="" /> : <FileText aria-hidden />}
      <span>
        <strong dir="auto">{document.name}</strong>
        {(pages || all) && <small>{pages ? `Pages ${pages}${first ? ` of ${count(first.numPages)}` : ""}` : all}</small>}
      </span>
    </span>
  );
}

/** The pages of a document with their numbers, and the document to be saved. */
export function DocumentPages({ document }: { document: Attachment }) {
  const [wanted, setWanted] = useState(AT_A_TIME);
  const [first] = usePreviews(document, 1);
  const [shown, isGone] = usePreviews(document, Math.min(wanted, first?.numPages ?? 1));
  const url = useAttachmentUrl(document);
  return (
    <div className="document">
      <ol aria-label="Pages" aria-busy={!shown && !isGone}>
        {(shown ?? first)?.pages.map(({ page, width, height, image }) => (
          <li key={page}>
            <img src={image} width={width} height={height} alt={`Page ${page}`} />
            <span aria-hidden>{page}</span>
          </li>
        ))}
      </ol>
      <div className="buttons">
        {first && first.numPages > wanted && (
          <button type="button" onClick={() => setWanted(wanted + AT_A_TIME)}>
            Show more of {plural(first.numPages, "page")}
          </button>
        )}
        {url === undefined ? (
          <span className="missing">No longer available</span>
        ) : (
          url && (
            <a className="button" href={url} download={document.name}>
              Save {document.name}
            </a>
          )
        )}
      </div>
    </div>
  );
}

/** The first pages of a document once they are there, and whether they cannot be shown. */
function usePreviews(document: Attachment, wanted: number): [shown: Previews | undefined, isGone: boolean] {
  const [known, setKnown] = useState<Previews>();
  const [isGone, setGone] = useState(false);
  useEffect(() => {
    let left = false;
    previews(document, wanted === 1 ? "1" : `1-${wanted}`).then(
      (found) => left || setKnown(found),
      () => left || setGone(true), // its name and a link are shown instead
    );
    return () => void (left = true);
  }, [document.id, wanted]);
  return [known, isGone];
}
