"""Which workers `vlmserve cluster up` starts."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from vlmserve.cli import app
from vlmserve.errors import ConfigurationError
from vlmserve.scaleout.settings import WorkerKind
from vlmserve.scaleout.storage import check_local
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig

DESCRIBED = """
[server]
storage_url = "none"
[engine]
max_num_seqs = 8
[worker.eyes]
model = "./eyes"
device = "cuda:1"
kv_cache_memory = "1GiB"
max_images = 3
[worker.words]
model = "./words"
device = "cpu"
max_num_seqs = 2
"""


@pytest.fixture
def up(monkeypatch, tmp_path):
    """Runs the command with a file's text. Returns the workers and the gateway's settings, or what went wrong."""

    def run(text: str, *arguments: str) -> tuple[list[WorkerKind], ServerConfig] | str:
        found: list[object] = []
        started = SimpleNamespace(up=lambda kinds, server, gateway: found.extend((kinds, server)))
        monkeypatch.setattr(importlib.import_module("vlmserve.cli.cluster"), "worker_commands", lambda: started)
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["cluster", "up", "--config", str(path), *arguments])
        return (found[0], found[1]) if result.exit_code == 0 else " ".join(result.stderr.split())

    return run


def test_every_section_of_a_worker_starts_one(up):
    kinds, server = up(DESCRIBED, "--port", "9", "--gpus", "1", "--seed", "5")
    assert [(kind.name, kind.count) for kind in kinds] == [("eyes", 1), ("words", 1)]
    eyes, words = kinds
    assert (eyes.engine.model, eyes.engine.device, eyes.engine.kv_cache_memory) == ("./eyes", "cuda:1", 1024**3)
    assert (eyes.engine.max_num_seqs, words.engine.max_num_seqs) == (8, 2)
    assert (eyes.media.max_images, words.media.max_images) == (3, MediaConfig().max_images)
    assert {kind.engine.seed for kind in kinds} == {5}
    assert {kind.server.storage_url for kind in kinds} == {server.storage_url} == {"none"}
    assert server.port == 9


def test_one_section_or_none_starts_requested_count(up):
    [eyes], _ = up(DESCRIBED, "--worker", "eyes", "--workers", "3")
    assert (eyes.name, eyes.count, eyes.engine.model) == ("worker", 3, "./eyes")
    [kind], _ = up("[engine]\nmax_num_seqs = 4\n")
    assert (kind.count, kind.engine.max_num_seqs) == (2, 4)


def test_a_number_beside_sections_is_refused(up):
    said = up(DESCRIBED, "--workers", "3")
    assert "eyes, words" in said
    assert "--worker" in said
    assert "[worker.words] port wrong" in up(DESCRIBED + "port = 'wrong'\n")


def test_models_without_workers_are_rejected(up):
    said = up('[model.words]\nmodel = "./words"\n')
    assert "[model.words]" in said
    assert "vlmserve serve --config" in said
    kinds, _ = up(DESCRIBED + '[model.words]\nmodel = "./words"\n')
    assert [kind.name for kind in kinds] == ["eyes", "words"]


def test_cpu_engines_share_cores_and_get_no_gpu():
    def ready(**engine: object) -> WorkerKind:
        return WorkerKind("a", EngineConfig(**engine), MediaConfig(), ServerConfig(), gpus=1).ready(3)

    assert (ready(device="cpu").engine.num_threads, ready(device="cpu").gpus) == (3, 0)
    assert (ready(device="cuda").engine.num_threads, ready(device="cuda").gpus) == (None, 1)
    assert ready(device="cpu", num_threads=7).engine.num_threads == 7


def test_workers_of_one_machine_share_one_history():
    files = [ServerConfig(storage_path="a.db"), ServerConfig(storage_path="a.db")]
    check_local(files)
    check_local([ServerConfig(storage_url="memory")])
    with pytest.raises(ConfigurationError, match="one history"):
        check_local([*files, ServerConfig(storage_path="b.db")])
    with pytest.raises(ConfigurationError, match="belongs to one process"):
        check_local([ServerConfig(storage_url="memory")] * 2)


def test_worker_offers_models_of_folder_and_file(monkeypatch, tmp_path):
    found: list[list[str]] = []
    joined = SimpleNamespace(
        join_as_host=lambda listed, models, server, **_: found.append([one.name for one in listed]),
        join_as_worker=lambda *_, **__: found.append([]),
    )
    monkeypatch.setattr(importlib.import_module("vlmserve.cli.cluster"), "worker_commands", lambda: joined)
    (tmp_path / "models" / "eyes").mkdir(parents=True)
    (tmp_path / "models" / "eyes" / "config.json").write_text("{}")
    (file := tmp_path / "models.toml").write_text('[model.words]\nmodel = "./words"\n')

    def worker(*arguments: str) -> str:
        return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["worker", *arguments]).output

    worker("--models-dir", str(tmp_path / "models"), "--config", str(file))
    worker("--config", str(file))
    worker("pixie")
    assert found == [["words", "eyes"], ["words"], []]
    assert "add --models-dir" in worker("--models-memory", "1GiB")
    assert "leave it out" in " ".join(worker("pixie", "--models-dir", str(tmp_path / "models")).split())
