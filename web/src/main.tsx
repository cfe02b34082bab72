import "./styles/base.css";
import "./styles/frame.css";
import "./styles/chat.css";
import "./styles/dialogs.css";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { App } from "./app";
import { start } from "./state/session";

void start();
createRoot(document.getElementById("root")!).render(
  <StrictMode>
    <App />
  </StrictMode>,
);
