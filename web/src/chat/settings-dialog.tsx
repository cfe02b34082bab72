import type { ReactNode } from "react";
import type { Server } from "../api/server";
import { SAMPLING_FIELDS, changeSettings, useSettings, type SamplingField, type Settings, type Theme } from "../state/settings";
import type { Place } from "../state/types";
import { Dialog } from "./dialog";
import { ModelChoice } from "./model-choice";

const THEMES: Record<Theme, string> = { system: "As the system", light: "Light", dark: "Dark" };

/** The model, how it answers, where conversations are kept, and how the page looks. */
export function SettingsDialog({ server, onKey, onClose }: { server: Server; onKey: () => void; onClose: () => void }) {
  const settings = useSettings();
  const { sampling } = settings;
  const usual = server.models[0]?.default_parameters;
  const change = (next: Settings["sampling"]) => changeSettings({ sampling: { ...sampling, ...next } });
  return (
    <Dialog title="Settings" wide onClose={onClose}>
      <form onSubmit={(event) => event.preventDefault()}>
        <label>
          Model
          <ModelChoice models={server.models} />
        </label>
        <label>
          System prompt
          <textarea rows={2} value={sampling.system ?? ""} onChange={(event) => change({ system: event.target.value || undefined })} />
        </label>
        <fieldset>
          <legend>Sampling</legend>
          <p className="hint">Empty fields use the model's defaults, which they show.</p>
          <div className="numbers">
            {(Object.keys(SAMPLING_FIELDS) as SamplingField[]).map((field) => (
              <NumberField key={field} field={field} usual={usual?.[field]} value={sampling[field]} onChange={(value) => change({ [field]: value })} />
            ))}
          </div>
          <button type="button" onClick={() => changeSettings({ sampling: { model: sampling.model } })}>Use the model's defaults</button>
        </fieldset>
        <Choice<Place>
          legend="Where new conversations are stored"
          name="place"
          value={settings.place}
          options={{ browser: "In this browser", server: "On the server" }}
          disabled={server.keeps ? [] : ["server"]}
          onChange={(place) => changeSettings({ place })}
        >
          {server.keeps
            ? "On the server they can be opened from anywhere by their address, with the same key."
            : "This server stores no conversations."}
        </Choice>
        <Choice<Theme> legend="Colours" name="theme" value={settings.theme} options={THEMES} onChange={(theme) => changeSettings({ theme })} />
        <div className="buttons end">
          <button type="button" onClick={onKey}>API key…</button>
          <button className="primary" onClick={onClose}>
            Done
          </button>
        </div>
      </form>
    </Dialog>
  );
}

interface NumberProps {
  field: SamplingField;
  /** The model's default. */
  usual?: number;
  value?: number;
  onChange: (value?: number) => void;
}

function NumberField({ field, usual, value, onChange }: NumberProps) {
  const { label, hint, min, max, step } = SAMPLING_FIELDS[field];
  return (
    <label>
      {label}
      <input
        type="number"
        inputMode="decimal"
        min={min}
        max={max}
        step={step}
        placeholder={usual?.toString()}
        defaultValue={value}
        key={value === undefined ? "unset" : "set"}
        aria-describedby={`${field}-hint`}
        onChange={(event) => event.target.validity.valid && onChange(event.target.value === "" ? undefined : event.target.valueAsNumber)}
      />
      <span className="hint" id={`${field}-hint`}>
        {hint}
      </span>
    </label>
  );
}

interface ChoiceProps<Value extends string> {
  legend: string;
  name: string;
  value: Value;
  options: Record<Value, string>;
  disabled?: Value[];
  children?: ReactNode;
  onChange: (value: Value) => void;
}

function Choice<Value extends string>({ legend, name, value, options, disabled = [], children, onChange }: ChoiceProps<Value>) {
  return (
    <fieldset>
      <legend>{legend}</legend>
      <div className="choices">
        {(Object.entries(options) as [Value, string][]).map(([option, label]) => (
          <label key={option} className="check">
            <input
              type="radio"
              name={name}
              checked={value === option}
              disabled={disabled.includes(option)}
              onChange={() => onChange(option)}
            />
            {label}
          </label>
        ))}
      </div>
      {children && <p className="hint">{children}</p>}
    </fieldset>
  );
}
