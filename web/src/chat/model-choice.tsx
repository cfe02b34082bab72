import type { Model } from "../api/server";
import { changeSettings, useSettings } from "../state/settings";

/** Which model answers, or which adapter of it. */
export function ModelChoice({ models, label }: { models: Model[]; label?: string }) {
  const { sampling } = useSettings();
  const chosen = sampling.model ?? "";
  const [first, ...others] = models;
  const adapters = others.filter((model) => model.parent);
  const names = others.filter((model) => !model.parent);
  const isGone = chosen !== "" && models.length > 0 && !models.some((model) => model.id === chosen);
  return (
    <select
      aria-label={label}
      value={chosen === first?.id ? "" : chosen}
      onChange={(event) => changeSettings({ sampling: { ...sampling, model: event.target.value || undefined } })}
    >
      <option value="">{first?.id ?? "The server's"}</option>
      <Options models={names} />
      {adapters.length > 0 && (
        <optgroup label="Adapters">
          <Options models={adapters} />
        </optgroup>
      )}
      {isGone && <option value={chosen}>{chosen} (not served now)</option>}
    </select>
  );
}

function Options({ models }: { models: Model[] }) {
  return models.map((model) => <option key={model.id}>{model.id}</option>);
}
