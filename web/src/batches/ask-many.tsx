import { Ban, FolderOpen, Images, SendHorizontal } from "lucide-react";
import { useRef, useState, type InputHTMLAttributes } from "react";
import { startBatchAbout, type Rejected } from "../api/batches";
import type { Model } from "../api/server";
import { megabytes, plural } from "../format";
import { getSettings } from "../state/settings";
import { allShrunk } from "../state/shrink";
import type { Attachment } from "../state/types";
import { readable, requestsAbout } from "./questions";

const ACCEPTED = "image/*,.heic,.heif,application/pdf,.pdf,.tif,.tiff";
const FOLDER: InputHTMLAttributes<HTMLInputElement> & { webkitdirectory: string } = { webkitdirectory: "" };

const REJECTED_SHOWN = 5;

interface Chosen {
  files: Attachment[];
  /** The folder's name. */
  name: string;
}

/** A question about each image of a folder. attempt: runs work and shows what goes wrong. */
export function AskMany({ model, attempt }: { model?: Model; attempt: (work: () => Promise<unknown>) => Promise<void> }) {
  const [chosen, setChosen] = useState<Chosen>();
  const [question, setQuestion] = useState("");
  const [sent, setSent] = useState<number>();
  const [rejected, setRejected] = useState<Rejected[]>([]);
  const controller = useRef<AbortController>(undefined);
  const files = chosen?.files ?? [];

  async function start(): Promise<void> {
    const { signal } = (controller.current = new AbortController());
    setSent(0);
    await attempt(async () => {
      try {
        const fitting = await allShrunk(files, model?.useful_image_pixels);
        const write = (uploaded: Attachment[]) => requestsAbout(uploaded, question.trim(), model?.id ?? "", getSettings().sampling);
        setRejected(await startBatchAbout(fitting, chosen!.name, write, signal, setSent));
        setChosen(undefined);
      } catch (error) {
        if (!signal.aborted) throw error;
      }
    });
    setSent(undefined);
  }

  const choose = (found: FileList | null) => {
    if (!found?.length) return;
    const [folder] = found[0]!.webkitRelativePath.split("/");
    setChosen({ files: readable(found), name: folder || found[0]!.name.replace(/\.\w+$/, "") });
  };
  return (
    <form
      className="panel many"
      onSubmit={(event) => {
        event.preventDefault();
        void start();
      }}
    >
      <h2>Ask about many images</h2>
      <div className="buttons">
        <Chooser label="Choose a folder" icon={<FolderOpen aria-hidden />} {...FOLDER} onFiles={choose} />
        <Chooser label="Choose images" icon={<Images aria-hidden />} accept={ACCEPTED} onFiles={choose} />
      </div>
      {chosen && <p className="hint">{describe(files)}</p>}
      <label>
        Question
        <textarea dir="auto" rows={2} value={question} placeholder="What does this image show?" onChange={(event) => setQuestion(event.target.value)} />
      </label>
      <p className="hint">The model answers this question about each file, with the sampling and the system prompt of your settings.</p>
      {sent !== undefined && <progress aria-label={`Uploaded ${sent} of ${files.length} files`} value={sent} max={files.length} />}
      {rejected.length > 0 && (
        <ul className="problem" role="alert">
          {rejected.slice(0, REJECTED_SHOWN).map(({ name, reason }) => (
            <li key={name}>
              {name} was left out: {reason}
            </li>
          ))}
          {rejected.length > REJECTED_SHOWN && <li>and {rejected.length - REJECTED_SHOWN} more</li>}
        </ul>
      )}
      <div className="buttons">
        <button className="primary" disabled={sent !== undefined || files.length === 0 || !question.trim()}>
          <SendHorizontal aria-hidden /> {files.length > 0 ? `Ask about ${plural(files.length, "file")}` : "Ask"}
        </button>
        {sent !== undefined && (
          <button type="button" className="danger" onClick={() => controller.current?.abort()}>
            <Ban aria-hidden /> Stop
          </button>
        )}
      </div>
    </form>
  );
}

function describe(files: readonly Attachment[]): string {
  if (files.length === 0) return "There are no images or documents among these files.";
  const documents = files.filter(({ kind }) => kind === "document").length;
  const images = files.length - documents;
  const kinds = [images && plural(images, "image"), documents && plural(documents, "document")].filter(Boolean);
  return `${kinds.join(" and ")}, ${megabytes(files.reduce((sum, file) => sum + file.blob!.size, 0))}`;
}

interface ChooserProps extends InputHTMLAttributes<HTMLInputElement> {
  label: string;
  icon: React.ReactNode;
  onFiles: (files: FileList | null) => void;
}

function Chooser({ label, icon, onFiles, ...props }: ChooserProps) {
  const input = useRef<HTMLInputElement>(null);
  return (
    <>
      <input
        ref={input}
        type="file"
        multiple
        hidden
        aria-label={`${label} to ask about`}
        {...props}
        onChange={(event) => {
          onFiles(event.target.files);
          event.target.value = "";
        }}
      />
      <button type="button" onClick={() => input.current!.click()}>
        {icon} {label}
      </button>
    </>
  );
}
