"""Finds a checkpoint: built in, local, or from the Hugging Face hub. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmserve.config import BUILT_IN_MODEL
from vlmserve.errors import CheckpointNotFoundError, MissingWeightsError
from vlmserve.models.gguf.header import is_gguf, read_header, require_gguf
from vlmserve.models.names import is_short, repository_of, suggestion

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_PICKLES = ["*.bin", "*.pth"]
"""Downloaded only where there are no safetensors; nothing but tensors is read of them."""
GGUF = ".gguf"
_IGNORED = ["original/*", "*/*.safetensors", "onnx/*", "runs/*"]


def resolve_model(name: str, revision: str | None = None, *, progress: bool = True) -> Path:
    """The folder with the checkpoint called `name`, or its file if it is a GGUF file.

    name: ``pixie`` (in the package), a local folder or GGUF file, or a repository id of the Hugging Face hub or a short
    name of one (`vlmserve.models.names`), which is downloaded unless it is in the cache. ``HF_TOKEN``, ``HF_HOME`` and
    ``HF_HUB_OFFLINE`` are honoured.
    revision: branch, tag or commit of the repository. progress: show download bars.
    Raises CheckpointNotFoundError if there is no such checkpoint or it cannot be reached, MissingWeightsError if it
    has no weights in safetensors or PyTorch's files, ModelLoadError for a broken GGUF file.
    """
    folder = _built_in_folder() if name == BUILT_IN_MODEL else Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder, name)
    if name == BUILT_IN_MODEL:
        raise CheckpointNotFoundError(f"the built-in model {name!r} is missing from this installation: no {folder}")
    if folder.exists():
        return _checked_file(folder, name)
    if _looks_like_path(name):
        raise CheckpointNotFoundError(f"there is no folder or file {name}")
    repository = repository_of(name)
    if repository is None and is_short(name):
        raise CheckpointNotFoundError(f"there is no model {name}{suggestion(name)} (vlmserve models lists all names)")
    return _checked(_download(repository or name, revision, progress=progress), name)


def _built_in_folder() -> Path:
    return Path(__file__).resolve().parent.parent / BUILT_IN_MODEL / "model"


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~", "\\")) or name.count("/") > 1 or name.endswith("/") or "\\" in name


def _checked_file(path: Path, name: str) -> Path:
    if not is_gguf(path) and path.suffix != GGUF:
        raise CheckpointNotFoundError(
            f"{name} is a file; give the folder that holds config.json and the weights, or a {GGUF} file"
        )
    read_header(path)
    require_gguf()
    return path


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
    import httpx
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    at = f" at revision {revision!r}" if revision else ""
    quiet = not progress and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        options: dict[str, Any] = {"revision": revision, "ignore_patterns": _IGNORED}
        folder = Path(snapshot_download(name, allow_patterns=_FILES, **options))
        if not _has_any(folder, ["*.safetensors"]):
            folder = Path(snapshot_download(name, allow_patterns=_FILES + _PICKLES, **options))
        return folder
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
    finally:
        if quiet:
            enable_progress_bars()


def _reason(error: BaseException) -> str:
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    return f"{type(root).__name__}: {root}".splitlines()[0]
