import { useState } from "react";
import type { Problem } from "../api/problems";
import { changeSettings, getSettings } from "../state/settings";
import { Dialog } from "./dialog";

/** Asks for the key of a server that wants one. */
export function KeyDialog({ problem, onClose }: { problem?: Problem; onClose: () => void }) {
  const [key, setKey] = useState(getSettings().key);
  return (
    <Dialog title="API key" onClose={onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          changeSettings({ key: key.trim() });
          onClose();
        }}
      >
        {problem && <p className="problem">{problem.detail}.</p>}
        <label>
          Key
          <input type="password" autoComplete="off" value={key} autoFocus onChange={(event) => setKey(event.target.value)} />
        </label>
        <p className="hint">It is kept in this browser and sent to this server only. Ask the operator of the server for one.</p>
        <div className="buttons">
          <button type="button" onClick={onClose}>
            Cancel
          </button>
          <button className="primary">Use this key</button>
        </div>
      </form>
    </Dialog>
  );
}
