"""Prints the settings in effect, without secrets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from vlmserve.cli.fields import HIDDEN, plain_value, toml
from vlmserve.cli.sources import Origin, Origins
from vlmserve.settings.base import Settings, is_secret

DEFAULT = Origin("default", "default")
WIDE = 200
"""Columns if the output is not a terminal, so that no line wraps."""


def show(settings: Mapping[str, Settings], origins: Origins) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    table = Table("setting", "value", "from", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for section, config in settings.items():
        table.add_row(Text(f"[{section}]", style="bold"))
        for name, field, value in _entries(config):
            origin = origins.get(name, DEFAULT)
            style = "dim" if origin is DEFAULT else "bold"
            shown = plain_value(field, value, sizes_as_text=True)
            table.add_row(name, Text("" if shown is None else toml(shown), style), Text(origin.name, style))
        table.add_section()
    console.print(table)


def as_json(settings: Mapping[str, Settings], origins: Origins) -> str:
    """``{"server": {"port": {"value": 8000, "source": "flag", "from": "--port"}, …}, …}``; sizes in bytes."""
    sections = {}
    for section, config in settings.items():
        entries: dict[str, Any] = {}
        for name, field, value in _entries(config):
            origin = origins.get(name, DEFAULT)
            entries[name] = {"value": plain_value(field, value), "source": origin.kind, "from": origin.name}
        sections[section] = entries
    return json.dumps(sections, indent=2, ensure_ascii=False)


def as_toml(settings: Mapping[str, Settings], origins: Origins) -> str:
    """A file of all settings; unset and secret ones are comments."""
    sections = []
    for section, config in settings.items():
        lines = [f"[{section}]"]
        for name, field, value in _entries(config):
            shown = plain_value(field, value, sizes_as_text=True)
            if shown is None:
                lines.append(f"# {name} is not set: {field.description}")
            elif is_secret(field):
                lines.append(
                    f"# {name} is secret, so that it is {HIDDEN} here; it came from {_one_line(origins, name)}"
                )
            else:
                lines.append(f"{name} = {toml(shown)}")
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def _one_line(origins: Origins, name: str) -> str:
    return " ".join(origins.get(name, DEFAULT).name.split())


def _entries(config: Settings) -> Iterator[tuple[str, FieldInfo, Any]]:
    for name, field in type(config).model_fields.items():
        yield name, field, getattr(config, name)
