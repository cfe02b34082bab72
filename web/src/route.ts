/** Which view is shown stands behind the # of the address, so that any path of a proxy will do. */

import { useSyncExternalStore } from "react";

export type Route = { view: "live" | "batches" } | { view: "chat"; id?: string };

export function parseRoute(hash: string): Route {
  const [, view, id] = hash.split("/");
  if (view === "live" || view === "batches") return { view };
  return view === "c" && id ? { view: "chat", id: decodeURIComponent(id) } : { view: "chat" };
}

export function hrefOf(route: Route): string {
  if (route.view !== "chat") return `#/${route.view}`;
  return route.id ? `#/c/${encodeURIComponent(route.id)}` : "#/";
}

export function go(route: Route): void {
  location.hash = hrefOf(route);
}

function subscribe(listener: () => void): () => void {
  addEventListener("hashchange", listener);
  return () => removeEventListener("hashchange", listener);
}

export function useHash(): string {
  return useSyncExternalStore(subscribe, () => location.hash);
}
