import { useCallback, useEffect, useState } from "react";
import { newestBatches, type Batch } from "../api/batches";
import { explain, type Problem } from "../api/problems";
import { useSettings } from "../state/settings";
import { isUnfinished } from "./progress";

interface Known {
  batches?: readonly Batch[];
  hasMore: boolean;
  problem?: Problem;
}

const OFTEN = 1000;
const SELDOM = 10_000;

/** The newest batches for as long as somebody can see them: every second while one is unfinished. */
export function useBatches(wanted: number): Known & { refresh: () => void } {
  const { key } = useSettings();
  const [known, setKnown] = useState<Known>({ hasMore: false });
  const [round, setRound] = useState(0);
  const refresh = useCallback(() => setRound((before) => before + 1), []);
  useEffect(() => {
    const controller = new AbortController();
    let timer: ReturnType<typeof setTimeout>;
    async function look(): Promise<void> {
      let wait = SELDOM;
      if (document.visibilityState === "visible") {
        try {
          const found = await newestBatches(wanted, controller.signal);
          setKnown(found);
          if (found.batches.some(isUnfinished)) wait = OFTEN;
        } catch (error) {
          if (controller.signal.aborted) return;
          setKnown((before) => ({ ...before, problem: explain(error) }));
        }
      }
      timer = setTimeout(() => void look(), wait);
    }
    const show = () => document.visibilityState === "visible" && refresh();
    document.addEventListener("visibilitychange", show);
    void look();
    return () => {
      controller.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", show);
    };
  }, [key, wanted, round, refresh]);
  return { ...known, refresh };
}
