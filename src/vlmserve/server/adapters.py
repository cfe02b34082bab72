"""Adapters by name: in the engine, or in a folder that is loaded on demand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from vlmserve.adapters.location import CONFIG, WEIGHTS, check_name, files_of, holds_adapter, is_xlora, read_module
from vlmserve.adapters.xlora_config import XLoraFolder
from vlmserve.errors import (
    AdapterError,
    ConfigurationError,
    EngineDeadError,
    UnavailableError,
    UnknownModelError,
    VLMServeError,
)
from vlmserve.folders import expanded
from vlmserve.frontend.client import EngineClient
from vlmserve.settings.config import EngineConfig, ServerConfig
from vlmserve.types import AdapterInfo

logger = logging.getLogger(__name__)

_CHECK_INTERVAL = 1.0
"""Seconds between checks of an adapter's files for changes."""

Signature = tuple[tuple[int, int, int], ...]


class Adapters:
    """The adapters that the engine does not keep.

    folder: the only folder to load adapters from while the server runs. A request that names an adapter in it loads it,
    and reloads it when its files have changed.
    """

    def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        """Raises ConfigurationError for a path that is no folder, or without --enable-lora."""
        self.folder = None if server.lora_folder is None else expanded(server.lora_folder).resolve()
        if self.folder is not None and not engine.enable_lora:
            raise ConfigurationError("--lora-folder needs --enable-lora")
        if self.folder is not None and not self.folder.is_dir():
            raise ConfigurationError(f"--lora-folder {server.lora_folder} is not a folder")
        self._configured = {read_module(entry).name for entry in engine.lora_modules}
        # to be loaded again by a restarted engine
        self._loaded: dict[str, Path] = {}
        # Adapters of the settings that were unloaded.
        self._unloaded: set[str] = set()
        # Changed adapters of X-LoRA checkpoints; see `EngineClient.load_adapter`.
        self._pools: dict[str, dict[str, str]] = {}
        # their files when they were loaded, and the time of the last check
        self._seen: dict[str, Signature] = {}
        self._checked: dict[str, float] = {}
        self._failed: dict[str, tuple[Signature, str]] = {}
        """Adapters in the folder that failed to load: their files, and the reason."""
        self._locks: dict[str, asyncio.Lock] = {}
        self._restoring: asyncio.Future[None] | None = None

    def knows(self, client: EngineClient | None, name: str) -> bool:
        served = self._configured if client is None else client.calls.adapters
        return name in served or name in self._loaded or self._in_folder(name) is not None

    def infos(self, client: EngineClient | None) -> Iterator[tuple[str, AdapterInfo | None]]:
        served = {} if client is None else client.calls.adapters
        names = {*(self._configured if client is None else served), *self._loaded}
        if self.folder is not None:
            with contextlib.suppress(OSError):
                names |= {path.name for path in self.folder.iterdir() if self._in_folder(path.name) is not None}
        yield from ((name, served.get(name)) for name in sorted(names))

    async def resolve(self, client: EngineClient, name: str) -> None:
        """Have the engine serve the current version. Raises UnknownModelError, AdapterError."""
        if name in self._loaded or self.folder is None or name in self._configured:
            if self._restoring is not None:
                await asyncio.wait([self._restoring])
            self._check_served(client, name)
            return
        recent = time.monotonic() - self._checked.get(name, 0.0) < _CHECK_INTERVAL
        if recent and name in client.calls.adapters:
            return
        async with self._locks.setdefault(name, asyncio.Lock()):
            self._checked[name] = time.monotonic()
            folder = self._in_folder(name)
            if folder is None:
                self._pools.pop(name, None)
                self._failed.pop(name, None)
                if self._seen.pop(name, None) is not None and name in client.calls.adapters:
                    await client.calls.unload_adapter(name)
                self._check_served(client, name)
                return
            signature = _signature(folder)
            if name in client.calls.adapters and self._seen.get(name) == signature:
                return
            known = self._failed.get(name)
            if known is not None and known[0] == signature and name not in client.calls.adapters:
                raise AdapterError(known[1])
            try:
                self._check_files(folder, name)
                await client.calls.load_adapter(name, str(folder), self._pools.get(name))
                self._seen[name] = signature
                self._failed.pop(name, None)
            except AdapterError as error:
                if name not in client.calls.adapters:
                    self._failed[name] = signature, str(error)
                    raise
                # files that are being replaced may be inconsistent for a moment
                logger.warning("adapter %s stays as it was: %s", name, error)

    async def load(self, client: EngineClient, name: str, path: str) -> AdapterInfo:
        """Load an adapter from the folder. Raises AdapterError, also for a path outside of it."""
        check_name(name)
        folder = self._inside(path)
        async with self._locks.setdefault(name, asyncio.Lock()):
            info = await client.calls.load_adapter(name, str(folder))
            self._loaded[name] = folder
            self._pools.pop(name, None)
            self._unloaded.discard(name)
        return info

    async def unload(self, client: EngineClient, name: str) -> None:
        """Unload an adapter. A request that names one in the folder loads it again."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            await client.calls.unload_adapter(name)
            self._loaded.pop(name, None)
            self._pools.pop(name, None)
            if name in self._configured:
                self._configured.discard(name)
                self._unloaded.add(name)
            self._seen.pop(name, None)

    async def mix(self, client: EngineClient, mixture: str, name: str, path: str, *, replace: bool) -> None:
        """Have an X-LoRA checkpoint mix an adapter from the folder.

        mixture: the checkpoint's name. name: an output of its classifier. Raises AdapterError for an adapter that does
        not fit, and the errors of `resolve`.
        """
        await self._set_pool(client, mixture, name, str(self._inside(path)), replace=replace)

    async def leave_out(self, client: EngineClient, mixture: str, name: str) -> None:
        """Remove an adapter from an X-LoRA mixture. Raises the errors of `mix`."""
        await self._set_pool(client, mixture, name, "", replace=True)

    async def _set_pool(self, client: EngineClient, mixture: str, name: str, folder: str, *, replace: bool) -> None:
        if not self.knows(client, mixture):
            raise UnknownModelError(f"There is no X-LoRA checkpoint {mixture!r:.100} here", param="mixture")
        await self.resolve(client, mixture)
        async with self._locks.setdefault(mixture, asyncio.Lock()):
            self._check_served(client, mixture)
            info = client.calls.adapters[mixture]
            if not info.mixes:
                raise AdapterError(f"{mixture!r:.100} is no X-LoRA checkpoint and mixes nothing", param="mixture")
            if not folder and name not in info.mixes:
                raise AdapterError(f"{mixture!r:.100} mixes no adapter {name!r:.100}", param="lora_name")
            if name in info.mixes and not replace:
                message = f"{mixture!r:.100} mixes an adapter {name!r:.100} already; load_inplace replaces it"
                raise AdapterError(message, param="lora_name")
            pool = {**self._pools.get(mixture, {}), name: folder}
            await client.calls.load_adapter(mixture, info.path, pool)
            self._pools[mixture] = pool

    def restore(self, client: EngineClient) -> None:
        """Restore adapters on a restarted engine, which has only the adapters of the settings."""
        self._seen.clear()
        self._checked.clear()
        self._restoring = asyncio.ensure_future(self._restore(client))

    async def _restore(self, client: EngineClient) -> None:
        mixed = {name: Path(client.calls.adapters[name].path) for name in self._pools if name in client.calls.adapters}
        for name, folder in {**mixed, **self._loaded}.items():
            try:
                await client.calls.load_adapter(name, str(folder), self._pools.get(name))
            except VLMServeError as error:
                logger.error("adapter %s is lost: %s", name, error)
                self._loaded.pop(name, None)
                self._pools.pop(name, None)
                # the version of the settings lacks the changes that requests made
                await self._drop(client, name)
        for name in sorted(self._unloaded):
            await self._drop(client, name)

    async def _drop(self, client: EngineClient, name: str) -> None:
        if name in client.calls.adapters:
            with contextlib.suppress(EngineDeadError, UnavailableError):  # a dead engine serves none
                await client.calls.unload_adapter(name)

    def _inside(self, path: str) -> Path:
        """Resolve a path. Raises AdapterError outside of `folder`."""
        if self.folder is None:
            raise AdapterError("adapters are loaded only from the folder of --lora-folder, and none is set")
        try:
            folder = (self.folder / path).resolve()
            if folder == self.folder or not folder.is_relative_to(self.folder):
                raise AdapterError(f"{path!r:.200} is not inside the folder of --lora-folder")
            self._check_files(folder, path)
        except (OSError, ValueError) as error:  # too long, or a NUL
            raise AdapterError(f"{path!r:.60} cannot be a path: {error!s:.40}") from error
        return folder

    def _check_files(self, folder: Path, name: str) -> None:
        self._check_inside(files_of(folder), name)
        if holds_adapter(folder) and is_xlora(folder):
            mixed = XLoraFolder.find(folder).adapters
            self._check_inside([path / file for path in mixed for file in (CONFIG, WEIGHTS)], name)

    def _check_inside(self, files: Iterable[Path], name: str) -> None:
        assert self.folder is not None
        if not all(file.resolve().is_relative_to(self.folder) for file in files):
            raise AdapterError(f"{name!r:.60} has files that are links to outside of the folder of --lora-folder")

    def _check_served(self, client: EngineClient, name: str) -> None:
        if name not in client.calls.adapters:
            raise UnknownModelError(f"There is no model {name!r:.100} here", param="model")

    def _in_folder(self, name: str) -> Path | None:
        if self.folder is None or not name or name.startswith(".") or "/" in name or "\\" in name or "\0" in name:
            return None
        try:
            folder = (self.folder / name).resolve()
            known = folder.is_relative_to(self.folder) and holds_adapter(folder)
        except OSError:  # a name that is too long
            return None
        return folder if known else None


def _signature(folder: Path) -> Signature:
    found = []
    for path in files_of(folder):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)
