/** Settings that this browser keeps. */

import { useSyncExternalStore } from "react";
import { useKey } from "../api/client";
import type { Place } from "./types";

export const SAMPLING_FIELDS = {
  temperature: { label: "Temperature", hint: "0 always takes the likeliest token; higher values vary more.", min: 0, max: 100, step: 0.1 },
  top_p: { label: "Top-p", hint: "Samples from the likeliest tokens whose probabilities add up to this.", min: 0.01, max: 1, step: 0.01 },
  top_k: { label: "Top-k", hint: "Samples from this number of likeliest tokens; 0: all.", min: 0, max: 100000, step: 1 },
  min_p: { label: "Min-p", hint: "Excludes tokens below this share of the highest probability.", min: 0, max: 1, step: 0.01 },
  repetition_penalty: { label: "Repetition penalty", hint: "Above 1, earlier tokens become less likely.", min: 0.01, max: 100, step: 0.05 },
  maxTokens: { label: "Max tokens", hint: "Maximum length of an answer.", min: 1, max: 1000000, step: 1 },
  seed: { label: "Seed", hint: "The same seed gives the same answer.", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 },
} as const;

export type SamplingField = keyof typeof SAMPLING_FIELDS;

export type Sampling = { model?: string; system?: string } & { [field in SamplingField]?: number };

export type Theme = "system" | "light" | "dark";

export interface Settings {
  theme: Theme;
  key: string;
  /** Where new conversations are stored. */
  place: Place;
  /** True if single keys are shortcuts outside text fields. */
  shortcuts: boolean;
  sampling: Sampling;
}

const NAME = "vlmserve.settings";
const DEFAULTS: Settings = { theme: "system", key: "", place: "browser", shortcuts: true, sampling: {} };

let settings: Settings = { ...DEFAULTS, ...read() };
const listeners = new Set<() => void>();
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", apply);
apply();

export function getSettings(): Settings {
  return settings;
}

export function changeSettings(change: Partial<Settings>): void {
  settings = { ...settings, ...change };
  try {
    localStorage.setItem(NAME, JSON.stringify(settings));
  } catch {
    // A browser that keeps nothing still shows the page.
  }
  apply();
  for (const listener of listeners) listener();
}

export function useSettings(): Settings {
  return useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => settings,
  );
}

function read(): Partial<Settings> {
  try {
    return JSON.parse(localStorage.getItem(NAME) ?? "{}");
  } catch {
    return {};
  }
}

function apply(): void {
  useKey(settings.key);
  const own = dark.matches ? "dark" : "light";
  document.documentElement.dataset.theme = settings.theme === "system" ? own : settings.theme;
}
