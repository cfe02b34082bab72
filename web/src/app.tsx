import { KeyRound, LoaderCircle, Menu, RefreshCw, Settings2, X } from "lucide-react";
import { lazy, Suspense, useEffect, useMemo, useState } from "react";
import { useServer, type Server } from "./api/server";
import { Boundary } from "./boundary";
import { Chat } from "./chat/chat";
import { KeyDialog } from "./chat/key-dialog";
import { ModelChoice } from "./chat/model-choice";
import { SettingsDialog } from "./chat/settings-dialog";
import { ShortcutsDialog } from "./chat/shortcuts-dialog";
import { Sidebar } from "./chat/sidebar";
import { go, hrefOf, parseRoute, useHash } from "./route";
import { useShortcuts } from "./shortcuts";
import { useSettings } from "./state/settings";

const Live = lazy(() => import("./live/live"));
const Batches = lazy(() => import("./batches/batches"));

type Opened = "settings" | "key" | "shortcuts" | undefined;

export function App() {
  const hash = useHash();
  const route = useMemo(() => parseRoute(hash), [hash]);
  const server = useServer();
  const [opened, setOpened] = useState<Opened>();
  const [menu, setMenu] = useState(false);
  const needsKey = server.problem?.remedy === "key";

  useEffect(() => setMenu(false), [hash]);
  useEffect(() => {
    if (needsKey) setOpened("key");
  }, [needsKey]);
  useShortcuts({
    n: () => go({ view: "chat" }),
    l: () => go({ view: "live" }),
    b: () => go({ view: "batches" }),
    c: () => go({ view: "chat" }),
    ",": () => setOpened("settings"),
    "?": () => setOpened("shortcuts"),
  });

  return (
    <div className={route.view === "chat" ? "frame with-sidebar" : "frame"}>
      <a className="skip" href="#main" onClick={(event) => skip(event)}>
        Skip to the content
      </a>
      <header className="bar">
        {route.view === "chat" && (
          <button className="icon only-narrow" aria-label="Conversations" aria-expanded={menu} onClick={() => setMenu(!menu)}>
            {menu ? <X /> : <Menu />}
          </button>
        )}
        <span className="brand">vlmserve</span>
        <nav aria-label="Views">
          <a href={hrefOf({ view: "chat" })} aria-current={route.view === "chat" ? "page" : undefined}>
            Chat
          </a>
          <a href={hrefOf({ view: "live" })} aria-current={route.view === "live" ? "page" : undefined}>
            Live
          </a>
          {server.keeps && (
            <a href={hrefOf({ view: "batches" })} aria-current={route.view === "batches" ? "page" : undefined}>
              Batches
            </a>
          )}
        </nav>
        <ModelName server={server} />
        <button className="icon" aria-label="Settings" title="Settings" onClick={() => setOpened("settings")}>
          <Settings2 />
        </button>
      </header>
      <Banner server={server} onKey={() => setOpened("key")} />
      {route.view === "chat" ? (
        <>
          <Sidebar open={menu} current={route.id} onShortcuts={() => setOpened("shortcuts")} onClose={() => setMenu(false)} />
          <Boundary key={route.id ?? "new"}>
            <Chat id={route.id} model={server.models[0]} onKey={() => setOpened("key")} />
          </Boundary>
        </>
      ) : (
        <Boundary key={route.view}>
          <Suspense fallback={<main id="main" className="view" aria-busy="true" />}>
            {route.view === "live" ? <Live /> : <Batches model={server.models[0]} />}
          </Suspense>
        </Boundary>
      )}
      {opened === "settings" && <SettingsDialog server={server} onKey={() => setOpened("key")} onClose={() => setOpened(undefined)} />}
      {opened === "key" && <KeyDialog problem={needsKey ? server.problem : undefined} onClose={() => setOpened(undefined)} />}
      {opened === "shortcuts" && <ShortcutsDialog onClose={() => setOpened(undefined)} />}
    </div>
  );
}

function skip(event: React.MouseEvent): void {
  event.preventDefault(); // the address says which view is shown
  document.getElementById("main")?.focus();
}

/** The model that answers, to be changed where there are several. */
function ModelName({ server }: { server: Server }) {
  const { sampling } = useSettings();
  const [first] = server.models;
  if (server.models.length > 1 || (sampling.model && sampling.model !== first?.id)) {
    return (
      <span className="model">
        <ModelChoice models={server.models} label="The model that answers" />
      </span>
    );
  }
  const name = first?.id;
  return <span className="model">{name && <span title="The model that answers">{name}</span>}</span>;
}

function Banner({ server, onKey }: { server: Server; onKey: () => void }) {
  const { problem, loading } = server;
  return (
    <div role="status" className={problem ? "banner" : undefined}>
      {problem && (
        <>
          {loading && <LoaderCircle className="spin" aria-hidden />}
          <p>
            <strong>{problem.title}.</strong> {problem.detail}
          </p>
          {problem.remedy === "key" ? (
            <button onClick={onKey}>
              <KeyRound aria-hidden /> Enter a key
            </button>
          ) : (
            !loading && (
              <button onClick={server.refresh}>
                <RefreshCw aria-hidden /> Try again
              </button>
            )
          )}
        </>
      )}
    </div>
  );
}
