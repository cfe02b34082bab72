"""Writes docs/settings.md: ``vlmserve config --reference > docs/settings.md``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from typing import TypeVar

from pydantic.fields import FieldInfo

from vlmserve.cli.fields import SECTIONS, flag, is_switch, plain_value, toml, type_name, variable
from vlmserve.cli.sources import OTHER_VARIABLES
from vlmserve.scaleout.settings import ModelsConfig
from vlmserve.settings import vllm_flags as vllm
from vlmserve.settings.base import is_secret
from vlmserve.settings.llama_flags import LLAMA_FLAGS

EntryT = TypeVar("EntryT", vllm.Unused, vllm.Missing)

INTRODUCTION = """\
# Settings

`vlmserve config --reference` writes this page from `src/vlmserve/settings/config.py`.

A setting is a flag, an environment variable and a key in a file, in this order of precedence:

    vlmserve serve --port 8001
    VLMSERVE_PORT=8001 vlmserve serve
    vlmserve serve --config vlmserve.toml

```toml
[server]
port = 8001
served_model_name = ["vision", "gpt-4o"]

[engine]
model = "llava-hf/llava-1.5-7b-hf"
kv_cache_memory = "4GiB"

[media]
mm_processor_kwargs = { max_pixels = 501760 }
```

- vlmserve reads only the file that `--config` or `VLMSERVE_CONFIG` names. `vlmserve config --toml` writes a
  complete file, and `vlmserve config` shows the settings in effect and where each comes from.
- An unknown section, key or variable that begins with `VLMSERVE_` is an error that suggests the right name. Variables
  that Kubernetes makes for a Service called vlmserve are ignored, and an empty variable counts as not set.
- Sizes are written like `4GiB`, `512MB` or `1048576`. A list is a repeated flag, `["a", "b"]` in a file, and `a,b` or
  JSON in a variable. Yes and no are `--flag` and `--no-flag`, `true` and `false`.
- The other commands (`ask`, `chat`, `bench`, `verify`, `quantize`, `eval`) read the same variables and files, but use
  only settings that are also their flags. The model of `verify`, `quantize` and `eval perplexity` is always an
  argument. `vlmserve.LLM` in Python takes options from its caller only.
- Secrets are never shown, neither by `vlmserve config` nor in errors.

## [worker.NAME]

One file may describe several servers of one machine. The sections below hold what they share. Settings of one server
are in the section of its worker, whatever section they belong to:

```toml
[server]
host = "0.0.0.0"

[engine]
kv_cache_memory = "8GiB"

[worker.vision]
model = "Qwen/Qwen2.5-VL-7B-Instruct"
port = 8001
device = "cuda:0"

[worker.text]
model = "Qwen/Qwen2.5-7B-Instruct"
port = 8002
device = "cuda:1"
kv_cache_memory = "20GiB"
```

    vlmserve serve --config vlmserve.toml --worker vision
    VLMSERVE_WORKER=text vlmserve serve --config vlmserve.toml
    vlmserve config --config vlmserve.toml --worker text

A worker's section overrides the other sections; variables and flags override it. Without `--worker` no worker's
section is used. The keys of all of them are always checked. A name that the file does not have is an error.
`vlmserve cluster up --config vlmserve.toml` starts all of them behind one address ([clusters](cluster.md)); their ports
have no effect then.

## [model.NAME]

Sections of models, which may hold the same settings, describe [several models](several-models.md) of one server:

```toml
[model.vision]
model = "qwen3-vl:2b"

[model.text]
model = "/models/smollm2.gguf"
max_model_len = 8192
```

    vlmserve serve --config vlmserve.toml --models-memory 16GiB
"""

SEVERAL = """\
## Several models

These settings of [several models](several-models.md) are flags only:
"""


VLLM = """\
## vLLM's flags

Flags with the same name have the same meaning. Underscores (`--max_model_len`), several words after a flag with
several values (`vlmserve serve MODEL --served-model-name a b`) and single keys of JSON (`--limit-mm-per-prompt.image
4`) are accepted as well.
"""


LLAMA = """\
## llama.cpp's flags

`vlmserve serve`, `chat` and `run` also take these flags of `llama-server`. `-m` and `-hf` name the model.
"""


def reference_page() -> str:
    parts = [INTRODUCTION]
    for section, kind in SECTIONS.items():
        meaning = (kind.__doc__ or "").partition("\n")[0]
        parts.append(f"## [{section}]\n\n{meaning}\n")
        parts.append(_settings(kind.model_fields))
    parts += [SEVERAL, _flags_alone(ModelsConfig.model_fields)]
    others = ([f"`{name}`", meaning] for name, meaning in OTHER_VARIABLES.items())
    parts += ["## Other environment variables\n", _table(("variable", "what it does"), others), VLLM, *_vllm(), LLAMA]
    parts += _flags("llama.cpp", LLAMA_FLAGS.items())
    return "\n".join(parts)


def _settings(fields: Mapping[str, FieldInfo]) -> str:
    headings = ("flag", "variable", "key", "type", "default", "what it does", "in vLLM")
    rows = []
    for name, field in fields.items():
        shown = None if is_secret(field) else plain_value(field, field.default, sizes_as_text=True)
        flags = f"`{flag(name)}`" + (f", `{flag('no_' + name)}`" if is_switch(field) else "")
        default = "" if shown in (None, [], {}) else f"`{toml(shown)}`"
        others = ", ".join(f"`{other}`" for other in vllm.flags_for(name))
        rows.append((flags, f"`{variable(name)}`", f"`{name}`", type_name(field), default, field.description, others))
    return _table(headings, rows)


def _flags_alone(fields: Mapping[str, FieldInfo]) -> str:
    def default(field: FieldInfo) -> str:
        return "" if field.default is None else f"`{field.default}`"

    rows = [(f"`{flag(name)}`", type_name(field), default(field), field.description) for name, field in fields.items()]
    return _table(("flag", "type", "default", "what it does"), rows)


def _vllm() -> Iterable[str]:
    own = {flag(name) for kind in SECTIONS.values() for name in kind.model_fields}
    values = [
        (f"`{flag(name)} {theirs}`", f"`{flag(name)} {ours}`", "")
        for name, others in vllm.VALUES.items()
        for theirs, ours in others.items()
    ]
    return _flags("vLLM", [(name, entry) for name, entry in vllm.FLAGS.items() if name not in own], values)


def _flags(
    program: str, entries: Collection[tuple[str, vllm.Entry]], values: Iterable[tuple[str, str, str]] = ()
) -> Iterable[str]:
    """Tables of another program's flags. values: rows about values with other spellings."""
    renamed = [
        (f"`{name}`", ", ".join(f"`{flag(target)}`" for target in entry.fields), entry.note)
        for name, entry in entries
        if isinstance(entry, vllm.Renamed)
    ]
    yield _table((program, "here", ""), [*renamed, *values])
    yield "Accepted without effect, with a line in the log:\n"
    unused = [(name, entry) for name, entry in entries if isinstance(entry, vllm.Unused)]
    yield _table(
        ("flag", "values", "why"),
        ((names, ", ".join(f"`{v}`" for v in entry.values), entry.why) for names, entry in _together(unused)),
    )
    yield "Rejected, because vlmserve has no such setting:\n"
    missing = [(name, entry) for name, entry in entries if isinstance(entry, vllm.Missing)]
    yield _table(("flag", "instead"), ((names, entry.why) for names, entry in _together(missing)))


def _together(entries: Iterable[tuple[str, EntryT]]) -> Iterable[tuple[str, EntryT]]:
    for _, group in groupby(entries, key=lambda pair: id(pair[1])):
        rows = list(group)
        yield ", ".join(f"`{name}`" for name, _ in rows), rows[0][1]


def _table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    headings = tuple(headings)
    lines = [headings, ("---",) * len(headings), *rows]
    return "".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
