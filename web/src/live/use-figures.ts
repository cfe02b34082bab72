import { useEffect, useState } from "react";
import { getJson } from "../api/client";
import { explain, type Problem } from "../api/problems";
import { useSettings } from "../state/settings";
import { withSamples, type Figures, type History } from "./figures";

export interface Watch {
  figures?: Figures;
  history: History;
  problem?: Problem;
}

const INTERVAL = 1000;

/** The server's figures, read every second while the page is visible. */
export function useFigures(): Watch {
  const { key } = useSettings();
  const [watch, setWatch] = useState<Watch>({ history: {} });
  useEffect(() => {
    const controller = new AbortController();
    let timer: ReturnType<typeof setTimeout>;
    async function look(): Promise<void> {
      if (document.visibilityState === "visible") {
        try {
          const figures = await getJson<Figures>("live", controller.signal);
          setWatch((before) => ({ figures, history: withSamples(before.history, before.figures, figures) }));
        } catch (error) {
          if (controller.signal.aborted) return;
          setWatch((before) => ({ ...before, problem: explain(error) }));
        }
      }
      timer = setTimeout(() => void look(), INTERVAL);
    }
    void look();
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, [key]);
  return watch;
}
