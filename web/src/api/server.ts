/** The server's model, abilities and state. */

import { useCallback, useEffect, useState } from "react";
import { useSettings } from "../state/settings";
import { ApiError, getJson } from "./client";
import { keepsHistory } from "./history";
import { explain, type Problem } from "./problems";

export interface Model {
  id: string;
  max_model_len: number | null;
  /** Sampling where a request sets none. */
  default_parameters?: Partial<Record<string, number>> | null;
  /** Most bytes of a request; files take a third more than alone. */
  max_request_bytes?: number | null;
  /** Area above which an image shows the model nothing more. */
  useful_image_pixels?: number | null;
  /** An adapter's base model. */
  parent?: string;
}

export interface Server {
  models: Model[];
  /** True if the server stores conversations. */
  keeps: boolean;
  /** Why it cannot be asked now. */
  problem?: Problem;
  /** True while the server starts or loads its model. */
  loading: boolean;
  refresh: () => void;
}

const RETRY = 2000;

export function useServer(): Server {
  const { key } = useSettings();
  const [found, setFound] = useState<Omit<Server, "refresh">>({ models: [], keeps: false, loading: false });
  const [round, setRound] = useState(0);
  const refresh = useCallback(() => setRound((number) => number + 1), []);

  useEffect(() => {
    const controller = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    look(controller.signal).then(
      (next) => {
        if (controller.signal.aborted) return;
        setFound((before) => ({ ...before, ...next }));
        if (next.loading || next.problem?.remedy === undefined && next.problem) timer = setTimeout(refresh, RETRY);
      },
      () => undefined, // the page has asked anew meanwhile
    );
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, [key, round, refresh]);

  return { ...found, refresh };
}

async function look(signal: AbortSignal): Promise<Partial<Server> & { loading: boolean }> {
  try {
    const models = (await getJson<{ data: Model[] }>("v1/models", signal)).data;
    const keeps = await keepsHistory();
    try {
      await getJson("ready", signal);
      return { models, keeps, loading: false, problem: undefined };
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 503) throw error;
      return { models, keeps, loading: true, problem: { title: "The server is not ready yet", detail: error.message } };
    }
  } catch (error) {
    if (signal.aborted) throw error;
    return { loading: false, problem: explain(error) };
  }
}
