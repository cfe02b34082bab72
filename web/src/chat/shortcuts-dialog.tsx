import { ALWAYS, SHORTCUTS } from "../shortcuts";
import { changeSettings, useSettings } from "../state/settings";
import { Dialog } from "./dialog";

export function ShortcutsDialog({ onClose }: { onClose: () => void }) {
  const { shortcuts } = useSettings();
  return (
    <Dialog title="Keyboard shortcuts" onClose={onClose}>
      <Keys rows={ALWAYS} />
      <h3>Outside text fields</h3>
      <Keys rows={SHORTCUTS} />
      <label className="check">
        <input type="checkbox" checked={shortcuts} onChange={(event) => changeSettings({ shortcuts: event.target.checked })} />
        Single keys do this
      </label>
    </Dialog>
  );
}

function Keys({ rows }: { rows: [string, string][] }) {
  return (
    <dl className="keys">
      {rows.map(([keys, what]) => (
        <div key={keys}>
          <dt>
            <kbd>{keys}</kbd>
          </dt>
          <dd>{what}</dd>
        </div>
      ))}
    </dl>
  );
}
