"""Settings from environment variables and one TOML file. Variables override the file."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vlmserve.cli.fields import PREFIX, SECTIONS, section_of, toml, variable
from vlmserve.errors import ConfigurationError
from vlmserve.folders import expanded
from vlmserve.settings import vllm_flags as vllm

CONFIG = "VLMSERVE_CONFIG"
WORKER = "VLMSERVE_WORKER"
OTHER_VARIABLES: Mapping[str, str] = {
    CONFIG: "Path of the file with settings, like `--config`.",
    WORKER: "Worker section to apply, like `--worker`.",
    "VLMSERVE_ISAS": "For `setup.py`: instruction sets of native kernels: `best` (default), `here`, `all` or names.",
    "VLMSERVE_COVERAGE": "For `setup.py`: builds the native kernels for gcov.",
    "VLMSERVE_SANITIZE": "For `setup.py`: builds the native kernels with AddressSanitizer and UBSan.",
}
"""Variables that are not settings, by purpose."""

MAX_FILE_BYTES = 2**20
Group = Literal["worker", "model"]
"""Kinds of sections that describe several servers or models."""
_GROUPS: tuple[Group, ...] = ("worker", "model")
_WORKERS: Group = "worker"
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_KUBERNETES = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_KUBERNETES_URL = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True)
class Origin:
    """The source of a value. name: as typed, like ``--port``, ``VLMSERVE_PORT`` or a key."""

    kind: Literal["default", "flag", "environment", "file"]
    name: str


class Origins(dict[str, Origin]):
    """Sources of settings that differ from their defaults, by field."""


class Found(NamedTuple):
    value: Any
    origin: Origin


def read_sources(
    path: Path | None, worker: str | None, environ: Mapping[str, str], model: str | None = None
) -> dict[str, Found]:
    """Read the environment and the file at `path` or in `CONFIG`; return settings by field.

    Sections apply to all workers, ``[worker.NAME]`` and ``[model.NAME]`` to one. worker: default from `WORKER`.

    Raises ConfigurationError for an unreadable file, an unknown worker, and unknown variables or keys.
    """
    path, named = _file(path, environ)
    called = "--worker"
    if worker is None and environ.get(WORKER):
        worker, called = environ[WORKER], WORKER
    found: dict[str, Found] = {}
    if path is not None:
        found, described = _from_file(path, named)
        if worker is not None:
            found |= _of_worker(worker, described["worker"], f"{called} {worker}: {path}")
        if model is not None:
            found |= described["model"][model]
    elif worker is not None:
        raise ConfigurationError(f"{called} {worker}: --config has to name the file that describes this worker")
    return found | _from_environment(environ)


def described(path: Path | None, environ: Mapping[str, str], group: Group) -> list[str]:
    """Workers or models in the file, in order. Raises like `read_sources`."""
    path, named = _file(path, environ)
    return [] if path is None else list(_from_file(path, named)[1][group])


def _file(path: Path | None, environ: Mapping[str, str]) -> tuple[Path | None, str]:
    if path is None and environ.get(CONFIG):
        return expanded(environ[CONFIG]), CONFIG
    return path, "--config"


def _from_environment(environ: Mapping[str, str]) -> dict[str, Found]:
    """Variables with our prefix. Compose files pass missing ones as empty: skip these."""
    settings = {variable(name): name for name in _names()}
    found, problems = {}, []
    for key, text in environ.items():
        if not key.startswith(PREFIX) or key in OTHER_VARIABLES or not text or _is_kubernetes(key, text):
            continue
        if key in settings:
            found[settings[key]] = Found(text, Origin("environment", key))
        else:
            hint = _hint(key.removeprefix(PREFIX).lower(), [*_names(), "config", "worker"], variable)
            problems.append(f"unknown environment variable {key}{hint}")
    if problems:
        raise ConfigurationError("; ".join(sorted(problems)))
    return found


def _is_kubernetes(key: str, text: str) -> bool:
    """True for a variable that Kubernetes makes for a Service called vlmserve: ``VLMSERVE_PORT`` is a URL."""
    rest = key.removeprefix(PREFIX)
    is_url = rest.endswith("PORT") and _KUBERNETES_URL.match(text) is not None
    return is_url or _KUBERNETES.fullmatch(rest) is not None


def _from_file(path: Path, named: str) -> tuple[dict[str, Found], dict[Group, dict[str, dict[str, Found]]]]:
    """Settings of all servers, and of each worker and model."""
    shared: dict[str, Found] = {}
    described: dict[Group, dict[str, dict[str, Found]]] = {group: {} for group in _GROUPS}
    problems: list[str] = []

    def read(section: str, table: Mapping[str, Any], known: Collection[str]) -> Iterator[tuple[str, Found]]:
        for key, value in table.items():
            # A section below a worker's; "engine" is also a setting.
            is_nested = section not in SECTIONS and key in SECTIONS and isinstance(value, dict)
            place = f"{path} [{section}] {key}"
            if key in known and not is_nested:
                yield key, Found(value, Origin("file", place))
            else:
                problems.append(_unknown_key(section, key))

    for section, table in _parse(path, named).items():
        group = next((group for group in _GROUPS if group == section), None)
        if (group is None and section not in SECTIONS) or (not isinstance(table, dict) and section_of(section)):
            problems.append(_unknown_section(section, table))
        elif not isinstance(table, dict):
            problems.append(f"{section} is a section; write [{_header(section)}], and its settings below")
        elif group is None:
            shared |= read(section, table, SECTIONS[section].model_fields)
        else:
            for name, own in table.items():
                if isinstance(own, dict):
                    described[group][name] = dict(read(_header(section, name), own, _names()))
                else:
                    problems.append(f"[{section}] {name} belongs to no {group}; write it below [{_header(section)}]")
    if problems:
        raise ConfigurationError(f"{path}: {'; '.join(problems)}")
    return shared, described


def _of_worker(name: str, workers: Mapping[str, dict[str, Found]], place: str) -> dict[str, Found]:
    """Settings of one worker. Raises ConfigurationError, starting with `place`."""
    if name in workers:
        return workers[name]
    if not workers:
        raise ConfigurationError(f"{place} describes no workers; their settings stand below [{_header(_WORKERS)}]")
    close = difflib.get_close_matches(name, list(workers), 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigurationError(f"{place} has no [{_header(_WORKERS, name)}], only {', '.join(workers)}{hint}")


def _header(section: str, name: str = "NAME") -> str:
    if section not in _GROUPS:
        return section
    return f"{section}.{name if _BARE_KEY.fullmatch(name) else toml(name)}"


def _parse(path: Path, named: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{named} {path}: the file cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{named} {path}: the file is larger than {MAX_FILE_BYTES} bytes")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ConfigurationError(f"{named} {path}: the file is not in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        yaml = " (YAML is not read)" if path.suffix in (".yaml", ".yml") else ""
        raise ConfigurationError(f"{named} {path}: the file is not TOML{yaml}: {error}") from None


def _unknown_section(name: str, value: Any) -> str:
    if not isinstance(value, dict):
        home = section_of(name)
        hint = f"; write it below [{home}]" if home else _key_hint(name)
        return f"{name} stands in no section{hint}"
    headers = {section: f"[{_header(section)}]" for section in (*SECTIONS, *_GROUPS)}
    close = difflib.get_close_matches(name, list(headers), 1)
    hint = f"; did you mean {headers[close[0]]}?" if close else f", only {', '.join(headers.values())}"
    return f"there is no section [{name}]{hint}"


def _unknown_key(section: str, key: str) -> str:
    if section in SECTIONS:
        home = section_of(key)
        hint = f"; it belongs into [{home}]" if home else _key_hint(key)
    elif key in SECTIONS:
        hint = f"; write the settings of [{key}] right below [{section}]"
    else:
        hint = _hint(key, _names(), str)
    return f"[{section}] {key}: unknown setting{hint}"


def _key_hint(key: str) -> str:
    return _hint(key, _names(), lambda name: f"{name} in [{section_of(name)}]")


def _hint(name: str, known: Collection[str], describe: Callable[[str], str]) -> str:
    return vllm.hint(name, known, describe, "; `vlmserve config` lists all settings")


def _names() -> list[str]:
    return [name for kind in SECTIONS.values() for name in kind.model_fields]
