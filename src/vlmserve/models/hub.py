"""Finds a checkpoint: built in, local, or on the Hugging Face hub. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlmserve.errors import CheckpointNotFoundError, ConfigurationError, MissingWeightsError
from vlmserve.folders import expanded
from vlmserve.gguf.choice import GGUF, choose_files
from vlmserve.gguf.mmproj import ARCHITECTURE
from vlmserve.gguf.pair import make_pair
from vlmserve.gguf_header import is_gguf, read_header
from vlmserve.models.names import is_short, repository_of, suggestion
from vlmserve.settings.config import BUILT_IN_MODEL

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_PICKLES = ["*.bin", "*.pth"]
"""Downloaded only if there are no safetensors. They may contain only tensors."""
_AMONG_FILES = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<tag>[\w.-]+)|/(?P<path>[\w.-]+(/[\w.-]+)*))")
"""A repository id and a choice among its GGUF files."""
_IGNORED = ["original/*", "*/*.safetensors", "onnx/*", "runs/*"]


def resolve_model(name: str, revision: str | None = None, mmproj: str | None = None, *, progress: bool = True) -> Path:
    """Return the folder of the checkpoint `name`, or its file for a GGUF file without a vision tower.

    name: ``pixie``, a local folder or file, a repository id on the Hugging Face hub or its short name
    (`vlmserve.models.names`). For repositories with GGUF files, add a choice: ``owner/name:Q4_K_M`` or
    ``owner/name/folder``. revision: branch, tag or commit. mmproj: GGUF file of the vision tower; None: choose it from
    the model's folder or repository.

    ``HF_TOKEN``, ``HF_HOME`` and ``HF_HUB_OFFLINE`` apply.

    Raises CheckpointNotFoundError if the checkpoint does not exist or the hub is unreachable; MissingWeightsError
    without weights; ModelLoadError for a broken GGUF file or a mismatched pair; ConfigurationError for `mmproj` without
    a GGUF file.
    """
    folder = built_in_folder() if name == BUILT_IN_MODEL else expanded(name)
    if folder.is_dir():
        return _in_folder(folder, name, mmproj)
    if name == BUILT_IN_MODEL:
        raise CheckpointNotFoundError(f"the built-in model {name!r} is missing from this installation: no {folder}")
    if folder.exists():
        return _checked_file(folder, name, mmproj)
    if (among := _AMONG_FILES.fullmatch(name)) is not None:
        folder, wanted = _download_gguf(among["id"], among["tag"] or among["path"], revision, progress=progress)
        return _chosen(folder, wanted, name, mmproj)
    if _looks_like_path(name):
        raise CheckpointNotFoundError(f"there is no folder or file {name}")
    repository = repository_of(name)
    if repository is None and is_short(name):
        raise CheckpointNotFoundError(f"there is no model {name}{suggestion(name)} (vlmserve models lists all names)")
    _check_alone(name, mmproj)
    return _checked(_download(repository or name, revision, progress=progress), name)


def built_in_folder() -> Path:
    return Path(__file__).resolve().parent.parent / BUILT_IN_MODEL / "model"


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~", "\\")) or name.count("/") > 1 or name.endswith("/") or "\\" in name


def _checked_file(path: Path, name: str, mmproj: str | None) -> Path:
    if not is_gguf(path) and path.suffix != GGUF:
        raise CheckpointNotFoundError(
            f"{name} is a file; give the folder that holds config.json and the weights, or a {GGUF} file"
        )
    header = read_header(path)
    if header.architecture == ARCHITECTURE:
        raise ConfigurationError(
            f"{name} is a vision tower: give the {GGUF} file of its language model as the model, and this one with "
            "--mmproj"
        )
    if mmproj is None:
        return header.path
    tower = expanded(mmproj)
    if not tower.is_file():
        raise CheckpointNotFoundError(f"--mmproj {mmproj}: there is no such file; give the path of a {GGUF} file")
    return make_pair(header.path, tower)


def _in_folder(folder: Path, name: str, mmproj: str | None) -> Path:
    if (folder / "config.json").is_file() or next(folder.glob(f"*{GGUF}"), None) is None:
        _check_alone(name, mmproj)
        return _checked(folder, name)
    return _chosen(folder, None, name, mmproj)


def _chosen(folder: Path, wanted: str | None, name: str, mmproj: str | None) -> Path:
    choice = choose_files([path.relative_to(folder).as_posix() for path in folder.rglob(f"*{GGUF}")], wanted, name)
    if mmproj is None and choice.mmproj is not None:
        mmproj = str(folder / choice.mmproj)
    return _checked_file(folder / choice.parts[0], name, mmproj)


def _check_alone(name: str, mmproj: str | None) -> None:
    if mmproj is not None:
        raise ConfigurationError(
            f"--mmproj goes with a {GGUF} file; {name} is none, and has its vision tower in itself"
        )


def _checked(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise CheckpointNotFoundError(f"{name} is not a checkpoint: {folder} has no config.json{_gguf_files(folder)}")
    if not _has_any(folder, ["*.safetensors", *_PICKLES]):
        other = sorted(path.name for pattern in ("*.pt", "*.h5") for path in folder.glob(pattern))
        hint = f" ({', '.join(other[:3])} found: convert the checkpoint to safetensors)" if other else ""
        hint += _gguf_files(folder)
        raise MissingWeightsError(f"{name} has no weights: no *.safetensors file in {folder}{hint}")
    return folder


def _has_any(folder: Path, patterns: list[str]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _gguf_files(folder: Path) -> str:
    files = sorted(path.name for path in folder.glob(f"*{GGUF}"))
    return f"; to serve a {GGUF} file, give its own path ({', '.join(files[:3])})" if files else ""


def _download(name: str, revision: str | None, *, progress: bool) -> Path:
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"revision": revision, "ignore_patterns": _IGNORED}
    with _kind_errors(name, revision), _bars(shown=progress):
        folder = Path(snapshot_download(name, allow_patterns=_FILES, **options))
        if not _has_any(folder, ["*.safetensors"]):
            folder = Path(snapshot_download(name, allow_patterns=_FILES + _PICKLES, **options))
        if not _has_any(folder, ["*.safetensors", *_PICKLES]):
            _check_format(name, revision)
        return folder


def _check_format(name: str, revision: str | None) -> None:
    """Raises CheckpointNotFoundError for a repository with GGUF files, which needs a choice."""
    if found := [path for path in _list_files(name, revision) or () if path.endswith(GGUF)]:
        raise CheckpointNotFoundError(
            f"{name} has {GGUF} files: choose among them, like {name}:Q4_K_M; there are {', '.join(found[:8])}"
        )


def _download_gguf(name: str, wanted: str, revision: str | None, *, progress: bool) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download

    with _kind_errors(name, revision), _bars(shown=progress):
        if (paths := _list_files(name, revision)) is None:
            return Path(snapshot_download(name, revision=revision, allow_patterns=[f"*{GGUF}"])), wanted
        choice = choose_files(paths, wanted, name)
        files = [*choice.parts, *([choice.mmproj] if choice.mmproj else [])]
        return Path(snapshot_download(name, revision=revision, allow_patterns=files)), choice.parts[0]


def _list_files(name: str, revision: str | None) -> list[str] | None:
    """Return None offline, where the cache has to suffice."""
    import httpx
    from huggingface_hub import HfApi, constants

    try:
        return None if constants.HF_HUB_OFFLINE else HfApi().list_repo_files(name, revision=revision)
    except httpx.TransportError:
        return None


@contextmanager
def _bars(*, shown: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not shown and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            enable_progress_bars()


@contextmanager
def _kind_errors(name: str, revision: str | None) -> Iterator[None]:
    import httpx
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    try:
        yield
    except errors.HFValidationError as error:
        raise CheckpointNotFoundError(
            f"{name!r} is neither {BUILT_IN_MODEL!r}, a local folder nor a repository id like owner/name"
            f"{suggestion(name)}"
        ) from error
    except errors.GatedRepoError as error:
        raise CheckpointNotFoundError(
            f"{name} is gated: ask for access on its hub page and set HF_TOKEN to a token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointNotFoundError(f"{name} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{name} is not a local folder and not on the Hugging Face hub (for a private repository, set HF_TOKEN)"
            f"{suggestion(name)}"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise CheckpointNotFoundError(
            f"{name}{at} is not in the local cache and HF_HUB_OFFLINE forbids downloading it"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{name}{at} is not in the local cache and the Hugging Face hub cannot be reached: {_reason(error)}"
            f"{'' if '/' in name else suggestion(name)}"
        ) from error
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise CheckpointNotFoundError(f"{name}{at} could not be downloaded: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    return f"{type(root).__name__}: {root}".splitlines()[0]
