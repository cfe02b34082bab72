"""Packed weights in files: the same model at the next start, and nothing worse than a slow start for broken files."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoints import make_llama, make_qwen_vl
from tests.gguf_files import write_gguf
from tests.models.test_decoder import paged_run, token_sequences
from tests.native import built
from vlmserve.cli.cache import clear_cache, show_cache
from vlmserve.errors import ConfigurationError
from vlmserve.models import filling, weights_cache
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.packed_model import PackedModel
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.registry import load_model
from vlmserve.models.weights import Checkpoint
from vlmserve.models.weights_cache import SUFFIX, WeightsCache, source_parts
from vlmserve.settings.config import EngineConfig
from vlmserve.settings.quantization import QuantizationConfig

pytestmark = built


def start(folder: Path, cache: WeightsCache | None, scheme: str = "none", **options: Any) -> LoadedModel:
    return load_model(
        folder,
        LoadSettings(
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            kernels="native",
            quantization=QuantizationConfig(scheme=scheme, group_size=32),
            **options,
        ),
        cache=cache,
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightsCache:
    """A cache that keeps small models, and has written each before `start` returns."""
    monkeypatch.setattr(weights_cache, "SMALLEST_MODEL", 0)
    write_later = WeightsCache.write_later

    def write(self: WeightsCache, *args: Any) -> None:
        if (thread := write_later(self, *args)) is not None:
            thread.join()

    monkeypatch.setattr(WeightsCache, "write_later", write)
    return WeightsCache(tmp_path / "cache", 2**30)


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("the checkpoint was read")


def logits(model: LoadedModel) -> torch.Tensor:
    return torch.cat(paged_run(model, token_sequences(200, [30, 1, 12])).finish([9, 9, 9]))


def llama_in_blocks(folder: Path) -> Path:
    return write_gguf(make_llama(folder, hidden_size=96, intermediate_size=96), folder / "model.gguf", types="Q4_0")


def llama_in_superblocks(folder: Path) -> Path:
    """Its queries and keys have other bits than its values, which are part of the same product."""
    types = {"attn_v": "Q6_K", "": "Q4_K"}
    make_llama(folder, hidden_size=256, intermediate_size=256, num_attention_heads=8)
    return write_gguf(folder, folder / "model.gguf", types=types)


@pytest.mark.parametrize(
    ("make", "scheme"),
    [(make_llama, "none"), (make_llama, "int4"), (lambda folder: make_llama(folder, attention_bias=True), "int8"),
     (llama_in_blocks, "none"), (llama_in_superblocks, "none"),
     (lambda folder: make_qwen_vl(folder, "qwen3_vl"), "int8"),
     (lambda folder: make_llama(folder, tie_word_embeddings=True), "int8")],
    ids=["bfloat16", "int4", "int8 with biases", "gguf", "superblocks", "vision", "tied embeddings"],
)  # fmt: skip
def test_next_start_maps_the_same_model(
    tmp_path: Path, cache: WeightsCache, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path], scheme: str
) -> None:
    folder = make(tmp_path / "model")
    first = start(folder, cache, scheme)
    assert len(cache.files()) == 1
    monkeypatch.setattr(Checkpoint, "load", refuse)
    monkeypatch.setattr(filling, "model_identity", refuse)
    second = start(folder, cache, scheme)
    assert torch.equal(logits(second), logits(first))
    assert second.identity == first.identity
    assert second.weight_bytes == first.weight_bytes
    assert second.device.mapped_bytes >= second.weight_bytes > first.device.mapped_bytes == 0
    if first.vision is not None and second.vision is not None:
        names = dict(first.vision.named_modules())  # type: ignore[attr-defined]
        assert names.keys() == dict(second.vision.named_modules()).keys()  # type: ignore[attr-defined]


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def changed(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[-1:] = bytes([contents[-1] ^ 1])
    path.write_bytes(contents)


def changed_shape(path: Path) -> None:
    """A shape that does not fit the tensor."""
    path.write_bytes(re.sub(rb'(bfloat16", \[)\d', rb"\g<1>9", path.read_bytes(), count=1))


def changed_length(path: Path) -> None:
    """A header that is larger than the file, and than any length."""
    contents = bytearray(path.read_bytes())
    contents[8:16] = b"\xff" * 8
    path.write_bytes(contents)


@pytest.mark.parametrize(
    "breaking",
    [truncated, changed, changed_shape, changed_length, lambda path: path.write_bytes(b"{}"),
     lambda path: path.write_bytes(b"")],
    ids=["truncated", "changed", "changed shape", "changed length", "other kind", "empty"],
)  # fmt: skip
def test_broken_file_is_ignored(
    tmp_path: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture, breaking: Callable[[Path], object]
) -> None:
    folder = make_llama(tmp_path / "model")
    expected = logits(start(folder, cache))
    (file,) = cache.folder.glob("*" + SUFFIX)
    good = file.read_bytes()
    breaking(file)
    assert not cache.files() or breaking in (changed, truncated), "a broken header was shown"
    assert torch.equal(logits(start(folder, cache)), expected)
    assert sum("weights cache: ignoring" in line for line in caplog.messages) == 1
    assert file.read_bytes() == good


def test_file_of_another_checkpoint_is_ignored(
    tmp_path: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_llama(tmp_path / "model")
    start(folder, cache)
    (first,) = cache.files()
    contents = first.path.read_bytes()
    first.path.unlink()
    make_llama(folder, seed=1)
    identity = start(folder, cache).identity
    (second,) = cache.files()
    second.path.write_bytes(contents)
    assert start(folder, cache).identity == identity
    assert "written for another checkpoint" in caplog.text


@pytest.mark.parametrize(
    "header", [[], {}, {"model": 1}, {"key": "a", "size": 0, "tensors": {"a": ["b", -1, 0, 2**70]}}]
)
def test_forged_header_is_ignored(cache: WeightsCache, header: object) -> None:
    """The digest of a header that somebody made is right."""
    cache.folder.mkdir()
    path, text = cache.path({}), json.dumps(header).encode()
    digest = weights_cache.blake3(text).digest()
    path.write_bytes(weights_cache.MAGIC + len(text).to_bytes(8, "little") + digest + text)
    assert cache.read(path) is None
    assert all(isinstance(file.model, str) for file in cache.files())


def test_another_users_file_is_ignored(
    tmp_path: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_llama(tmp_path / "model")
    start(folder, cache)
    (file,) = cache.files()
    os.chmod(file.path, 0o602)
    assert cache.read(file.path) is None
    assert "every user can write to it" in caplog.text
    os.chown(file.path, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert cache.read(file.path) is None
    assert "belongs to another user" in caplog.text


def test_folder_of_every_user_is_rejected(
    tmp_path: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.folder.mkdir()
    cache.folder.chmod(0o777)
    start(make_llama(tmp_path / "model"), cache)
    assert list(cache.folder.iterdir()) == []
    assert [line for line in caplog.messages if "weights cache" in line] == [
        f"weights cache: off, since every user can write to {cache.folder} (chmod o-w)"
    ]


def test_start_survives_impossible_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    start(make_llama(tmp_path / "model"), WeightsCache(tmp_path / "file" / "cache", 2**30))
    assert "weights cache: ignoring" in caplog.text


def test_writing_follows_no_links(tmp_path: Path, cache: WeightsCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.folder.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = cache.path({})
    path.with_suffix(f".{os.getpid()}.writing").symlink_to(victim)
    written, planted, open_file = [], list[str](), os.open

    def plant_and_open(name: Any, flags: int, *mode: int, **options: Any) -> int:
        """As if another process had guessed the name of the first new file."""
        if flags & os.O_CREAT and str(name).endswith(".writing") and not planted:
            os.symlink(victim, name)
            planted.append(name)
        return open_file(name, flags, *mode, **options)

    monkeypatch.setattr(os, "open", plant_and_open)

    def seen(descriptor: int) -> None:
        (file,) = (file for file in cache.folder.glob("*.writing") if not file.is_symlink())
        written.append(file.stat().st_mode & 0o777)

    monkeypatch.setattr(os, "fsync", seen)
    cache.write_later(path, PackedModel({"a": torch.zeros(4)}, {}), b"identity", "model")
    assert written == [0o600]
    assert planted
    assert path.exists()
    assert victim.read_text() == "precious"


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_writer_leaves_processors_to_answers(cache: WeightsCache, monkeypatch: pytest.MonkeyPatch) -> None:
    priorities = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: priorities.append(os.getpriority(os.PRIO_PROCESS, 0)))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(
        target=cache.write_later, args=(cache.path({}), PackedModel({"a": torch.zeros(4)}, {}), b"", "model")
    )
    thread.start()
    thread.join()
    assert priorities == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_ending_program_leaves_no_unfinished_file(tmp_path: Path) -> None:
    code = f"""
import threading, torch
from pathlib import Path
from vlmserve.models import weights_cache
from vlmserve.models.packed_model import PackedModel
written = threading.Event()
def write(descriptor):
    written.set()
    threading.main_thread().join()
weights_cache.os.fsync = write
packed = PackedModel({{name: torch.zeros(weights_cache.SMALLEST_MODEL, dtype=torch.uint8) for name in "ab"}}, {{}})
cache = weights_cache.WeightsCache(Path({str(tmp_path)!r}), 2**40)
cache.write_later(cache.path({{}}), packed, b"", "model")
assert written.wait(60)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not list(tmp_path.iterdir())


def test_unfinished_files_of_running_writers_are_kept(cache: WeightsCache) -> None:
    """Writers in other containers may have the process number of this one, or one that is unknown here."""
    cache.folder.mkdir()
    path = cache.path({})
    for killed in (os.getpid(), 999999999):
        path.with_suffix(f".{killed}.writing").write_bytes(weights_cache.MAGIC)
    with cache.unfinished(path) as file:
        file.write(weights_cache.MAGIC)
        file.flush()
        cache.remove_unfinished()
        (unfinished,) = cache.folder.iterdir()
        assert os.path.samestat(unfinished.stat(), os.fstat(file.fileno()))
    assert list(cache.folder.iterdir()) == [path]


def test_changed_checkpoint_or_setting_reads_again(tmp_path: Path, cache: WeightsCache) -> None:
    folder = make_llama(tmp_path / "model")
    first = start(folder, cache)
    start(folder, cache, "int8")
    assert len(cache.files()) == 2
    make_llama(folder, seed=1)
    assert start(folder, cache).identity != first.identity
    assert len(cache.files()) == 3


def test_another_mount_maps_the_same_file(tmp_path: Path, cache: WeightsCache, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_llama(tmp_path / "model")
    start(folder, cache)
    look_up = Path.stat

    def elsewhere(path: Path, **options: bool) -> SimpleNamespace:
        found = look_up(path, **options)
        fields = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        return SimpleNamespace(**{**fields, "st_dev": found.st_dev + 1})

    monkeypatch.setattr(Path, "stat", elsewhere)
    monkeypatch.setattr(Checkpoint, "load", refuse)
    start(folder, cache)


def test_edited_code_reads_again(tmp_path: Path, cache: WeightsCache, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, paths = make_llama(tmp_path / "model"), set()
    packages = ("devices", "families", "gguf", "kernels", "layers", "models", "quant")
    modules = ("gguf_header.py", "layer_specs.py", "settings/quantization.py")
    names = [*(f"{package}/deep/code.py" for package in packages), *modules]
    for edited in ("none", *names):
        for name in names:
            code = tmp_path / edited / name
            code.parent.mkdir(parents=True, exist_ok=True)
            code.write_text("new" if name == edited else "old")
        monkeypatch.setattr(weights_cache, "PACKAGE", tmp_path / edited)
        parts = source_parts(folder, LoadSettings(torch.device("cpu"), torch.bfloat16, "avx2"))
        paths.add(cache.path(parts))
    assert len(paths) == 1 + len(names)


def test_digest_of_code_reads_this_package() -> None:
    assert (weights_cache.PACKAGE / "models" / "weights_cache.py").samefile(weights_cache.__file__)
    paths = [weights_cache.PACKAGE / name for name in weights_cache.PACKING]
    assert all(path.is_file() or any(path.glob("*.py")) for path in paths)


def test_read_only_folder_is_mapped(tmp_path: Path, cache: WeightsCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    folder = make_llama(tmp_path / "model")
    start(folder, cache)
    monkeypatch.setattr(os, "utime", read_only)
    monkeypatch.setattr(Checkpoint, "load", refuse)
    start(folder, cache)


@pytest.mark.parametrize("seen", ["before", "while writing"])
def test_full_disk_only_logs(
    tmp_path: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if seen == "before":
        monkeypatch.setattr(weights_cache, "SPARED_BYTES", 2**60)
    else:
        monkeypatch.setattr(os, "fsync", full)
    start(make_llama(tmp_path / "model"), cache)
    assert "cannot keep" in caplog.text
    assert "No space left" in caplog.text
    assert list(cache.folder.iterdir()) == []


def test_full_disk_keeps_other_files(
    tmp_path: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_llama(tmp_path / "model")
    start(folder, cache)
    (first,) = cache.files()
    small = WeightsCache(cache.folder, first.num_bytes * 3 // 2)
    usage = shutil.disk_usage(tmp_path)
    free = weights_cache.SPARED_BYTES - first.num_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    start(folder, small, "int8")
    assert "cannot keep" in caplog.text
    assert small.files() == [first]
    free += first.num_bytes  # removing the first file makes room
    start(folder, small, "int8")
    (second,) = small.files()
    assert second.path != first.path


def test_limit_removes_least_recently_used(tmp_path: Path, cache: WeightsCache) -> None:
    folder = make_llama(tmp_path / "model")
    start(folder, cache)
    (first,) = cache.files()
    os.utime(first.path, (1, 1))
    small = WeightsCache(cache.folder, first.num_bytes * 3 // 2)
    (small.folder / f"{'0' * 32}.999999999.writing").write_bytes(b"vlmserve, killed while it wrote")
    start(folder, small, "int8")
    (kept,) = small.folder.iterdir()
    assert kept != first.path
    start(folder, WeightsCache(cache.folder, 1000), "int4")
    assert list(small.folder.iterdir()) == [kept], "larger than the limit"
    assert small.clear() > 0
    assert small.files() == []


def test_foreign_files_are_kept(tmp_path: Path, cache: WeightsCache) -> None:
    cache.folder.mkdir()
    magic, digest = weights_cache.MAGIC, "0" * 32
    outside = tmp_path / "outside"
    outside.write_bytes(magic)
    foreign = {
        "yolov4.weights": magic,
        "notes.1.writing": magic,
        f"{digest}0.weights": magic,
        f"{digest}.weights": b"of another program",
        f"{digest}.1.writing": b"of another program",
    }
    for name, contents in foreign.items():
        (cache.folder / name).write_bytes(contents)
    (cache.folder / f"{'1' * 32}.weights").symlink_to(outside)
    start(make_llama(tmp_path / "model"), cache)
    (file,) = cache.files()
    assert cache.clear() == file.num_bytes
    assert {path.name for path in cache.folder.iterdir()} == {*foreign, f"{'1' * 32}.weights"}


def test_clearing_survives_removed_files(cache: WeightsCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.folder.mkdir()
    paths = [cache.folder / f"{digit * 32}.weights" for digit in "012"]
    for path in paths:
        path.write_bytes(weights_cache.MAGIC)
    look_up = Path.stat

    def and_remove(path: Path, **options: bool) -> os.stat_result:
        """Another process removes a file after its first look-up."""
        found = look_up(path, **options)
        if path == paths[1]:
            path.unlink()
        return found

    monkeypatch.setattr(Path, "stat", and_remove)
    assert cache.clear() == 2 * len(weights_cache.MAGIC)
    assert list(cache.folder.iterdir()) == []


def test_limit_of_zero_reads_and_writes_nothing(tmp_path: Path, cache: WeightsCache) -> None:
    start(make_llama(tmp_path / "model"), WeightsCache(cache.folder, 0))
    assert not cache.folder.exists()


def test_command_shows_and_clears(tmp_path: Path, cache: WeightsCache, capsys: pytest.CaptureFixture[str]) -> None:
    start(make_llama(tmp_path / "model"), cache)
    (file,) = cache.files()
    engine = EngineConfig(weights_cache=str(cache.folder))
    show_cache(engine)
    shown = capsys.readouterr().out
    assert file.model == "model"
    assert "model" in shown
    assert file.path.name in shown
    clear_cache(engine)
    assert "removed" in capsys.readouterr().out
    assert cache.files() == []


def test_clearing_a_read_only_folder_says_so(
    tmp_path: Path, cache: WeightsCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, **_: bool) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    start(make_llama(tmp_path / "model"), cache)
    (file,) = cache.files()
    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(ConfigurationError, match=f"cannot remove {file.path}: Read-only file system"):
        clear_cache(EngineConfig(weights_cache=str(cache.folder)))
