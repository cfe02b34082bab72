"""A real Ray on this machine with real workers."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from tests.mock_checkpoint import make_mock_checkpoint
from tests.waiting import wait_until
from vlmserve.cli import app
from vlmserve.errors import ModelLoadError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(170),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs vlmserve[ray]"),
]

QUESTION = [{"role": "user", "content": "What is in the picture?"}]


class Command:
    """A command of vlmserve that runs until it is interrupted."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "vlmserve", *arguments]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            process_group=0,
            # Ray asks for its token by default only where it looks for a cluster by itself.
            env={**os.environ, "VLMSERVE_LOG_FORMAT": "text", "RAY_AUTH_MODE": "token"},
        )
        self.lines: list[str] = []
        self.url = ""

    def wait_until_ready(self) -> None:
        self.url = self._url()

    def _url(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if line.startswith("vlmserve") and "is ready: " in line:
                return line.split("is ready: ")[1].split()[0]
        raise AssertionError(f"it ended with {self._process.wait()}: {self.lines}")

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True)

    def ray(self) -> tuple[str, str]:
        """The flag with which others join its Ray, of several that this machine may have."""
        flag = "--gcs-address="
        lines = (argument for process in self.family() for argument in process.cmdline())
        return "--address", next(one.removeprefix(flag) for one in lines if one.startswith(flag))

    def wait(self) -> int:
        """Its exit status, once it has ended by itself."""
        return self._process.wait(60)

    def stop(self, number: int = signal.SIGINT) -> int:
        """Interrupt it, by default as Ctrl-C does."""
        self._process.send_signal(number)
        self.lines += self._process.communicate(timeout=60)[0].splitlines(keepends=True)
        print(self.log(), file=sys.stderr)
        return self._process.returncode


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Command]:
    """A command; whatever happens, nothing of it is left."""
    command = Command(*arguments)
    family: list[psutil.Process] = []
    try:
        command.wait_until_ready()
        family = command.family()
        yield command
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += command.family()
        try:
            code = command.stop()
        finally:
            _, left = psutil.wait_procs(family, timeout=20)
            for process in left:
                process.kill()
        assert code == 0
        assert not left
        assert [line for line in command.lines if not line.startswith(("vlmserve", "another gateway"))] == []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two workers that differ, as a file describes them."""
    base = tmp_path_factory.mktemp("cluster")
    folder = make_mock_checkpoint(base)
    described = base / "cluster.toml"
    described.write_text(
        f'[engine]\nmodel = "{folder}"\nengine = "mock"\n[server]\nserved_model_name = ["tiny"]\n'
        'storage_url = "none"\n[worker.large]\nmax_num_seqs = 64\n[worker.small]\nmax_num_seqs = 32\n'
    )
    with running("cluster", "up", "--config", str(described), "--port", "0") as command:
        yield command


def up(url: str) -> list[str]:
    prefix = 'vlmserve:gateway_worker_up{worker="'
    page = httpx.get(f"{url}/metrics", timeout=20).text
    found = [line for line in page.splitlines() if line.startswith(prefix) and line.endswith(" 1.0")]
    return sorted(line[len(prefix) :].split('"')[0] for line in found)


def wait_for(url: str, *names: str) -> None:
    """Until two workers of the cluster, and those with these names, get requests."""
    wait_until(lambda: len(found := up(url)) == 2 + len(names) and set(names) <= set(found))


def ask(url: str, model: str = "tiny") -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={"model": model, "messages": QUESTION}, timeout=60)


def members(command: Command) -> list[tuple[psutil.Process, bool]]:
    """The processes of workers and gateways, and whether each is a worker."""
    from vlmserve.scaleout.ray.head import is_member

    found = []
    port = int(command.url.rpartition(":")[2])
    for process in command.family():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if is_member(process):
                ports = {one.laddr.port for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}
                found.append((process, bool(ports - {port})))
    return found


def test_a_cluster_answers(cluster):
    wait_for(cluster.url)
    assert ask(cluster.url).status_code == 200
    assert len(members(cluster)) == 3
    if sys.platform == "linux":
        assert len({process.ppid() for process, _ in members(cluster)}) == 1  # the preloader forked all
    assert up(cluster.url) == ["large-0", "small-0"]
    page = httpx.get(f"{cluster.url}/metrics", timeout=20).text
    blocks = {name: int(number) for name, number in re.findall(r'worker="(\w+)-0".*num_gpu_blocks="(\d+)"', page)}
    assert blocks["large"] == 2 * blocks["small"]


def test_a_cluster_of_one_machine_listens_on_loopback(cluster):
    """The gateway at --host, which is 127.0.0.1 by default; workers and Ray on 127.0.0.1."""
    listening = set()
    for process in cluster.family():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            found = [one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
            listening |= {(ip.removeprefix("::ffff:"), " ".join(process.cmdline())[:60]) for ip in found}
    assert len(listening) > 5
    assert [one for one in listening if one[0] != "127.0.0.1"] == []


def test_a_killed_worker_is_avoided_and_replaced(cluster):
    wait_for(cluster.url)
    victim = next(process for process, is_worker in members(cluster) if is_worker)
    victim.kill()
    assert {ask(cluster.url).status_code for _ in range(20)} == {200}
    wait_until(lambda: sum(is_worker for _, is_worker in members(cluster)) >= 2)
    wait_for(cluster.url)
    assert ask(cluster.url).status_code == 200


def test_a_worker_with_another_model_joins_and_leaves(cluster, tmp_path):
    folder = make_mock_checkpoint(tmp_path)
    joining = ("worker", str(folder), "--engine", "mock", "--served-model-name", "other", "--name", "third")
    with running(*joining, *cluster.ray()):
        wait_for(cluster.url, "third")
        assert ask(cluster.url, "other").json()["model"] == "other"
        models = {model["id"] for model in httpx.get(f"{cluster.url}/v1/models").json()["data"]}
        assert models == {"tiny", "other"}
    wait_for(cluster.url)
    assert ask(cluster.url, "other").status_code == 404
    assert ask(cluster.url).status_code == 200


def test_start_shows_progress_without_rays_lines(cluster):
    start = cluster.log().partition("2 of 2 workers loaded\n")
    steps = [re.fullmatch(r" *[\d.]+ s  (.+)", line) for line in (start[0] + start[1]).splitlines()]
    assert all(steps), cluster.log()
    assert steps[0][1] == "Starting Ray"
    assert Path(steps[1][1].rpartition(": ")[2], "raylet.out").is_file()
    assert cluster.lines == [cluster.lines[0]]


def test_failed_worker_ends_the_start(monkeypatch):
    from vlmserve.scaleout.ray import cluster

    trace = "It failed to start.\nTraceback:\n  File ...\nvlmserve.errors.ModelLoadError: ./eyes has no weights\n"
    deployment = SimpleNamespace(replica_states={}, message=trace)
    application = SimpleNamespace(status="DEPLOY_FAILED", message="it failed", deployments={"worker": deployment})
    status = SimpleNamespace(applications={"workers eyes": application})
    monkeypatch.setattr(cluster.serve, "status", lambda: status)
    with pytest.raises(ModelLoadError, match=r"^workers eyes cannot start: ./eyes has no weights$"):
        cluster.wait_until_running(threading.Event(), 1)


def test_second_gateway_serves_and_a_third_replaces_it(cluster):
    with running("gateway", "--port", "0", *cluster.ray()) as gateway:
        wait_for(gateway.url)
        assert ask(gateway.url).json()["choices"] == ask(cluster.url).json()["choices"]
        replacing = ("gateway", "--port", gateway.url.rpartition(":")[2], "--take-over")
        with running(*replacing, *cluster.ray()) as third:
            assert third.url == gateway.url
            assert gateway.wait() == 0
            assert ask(gateway.url).status_code == 200
            assert third.stop(signal.SIGTERM) == 0


def test_requests_go_on_after_rays_head(cluster):
    """Ray ends its processes a minute after its head unless each of them has the setting."""
    limit = "RAY_gcs_rpc_server_reconnect_timeout_s"
    wait_for(cluster.url)
    workers = up(cluster.url)  # one that was replaced may have another number
    own = {process.name(): process for process in cluster.family()}
    assert [own[name].environ().get(limit) for name in ("gcs_server", "raylet")] == ["86400"] * 2
    own["gcs_server"].kill()
    wait_until(lambda: "ERROR cluster Ray's head ended" in cluster.log())
    assert {ask(cluster.url).status_code for _ in range(5)} == {200}
    assert up(cluster.url) == workers


def test_the_files_for_deployments_describe_applications():
    """Both files have the same, and all of its settings exist."""
    from ray.serve.schema import ServeDeploySchema  # Ray Serve, which no other test process needs

    folder = Path(__file__).parents[2] / "deploy" / "ray"
    service = next(yaml.safe_load_all((folder / "rayservice.yaml").read_text()))
    for text in ((folder / "serve.yaml").read_text(), service["spec"]["serveConfigV2"]):
        described = ServeDeploySchema.model_validate(yaml.safe_load(text))
        assert described.proxy_location == "Disabled"
        for application in described.applications:
            module, _, name = application.import_path.partition(":")
            build = getattr(importlib.import_module(module), name)
            assert build(dict(application.args)) is not None
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    assert {"head", "first", "second", "database"} == compose["services"].keys()


def test_workers_may_start_before_their_predecessors_stop(monkeypatch):
    from vlmserve.scaleout.ray import deployments

    made, make = [], deployments.serve.deployment

    def note(*args, **options):
        made.append(options)
        return make(*args, **options)

    monkeypatch.setattr(deployments.serve, "deployment", note)
    for args, percent in (({}, 0), ({"max_surge_percent": 100}, 100)):
        assert deployments.workers({"storage_url": "none", **args}) is not None
        assert made[-1]["max_surge_percent"] == percent


@pytest.mark.parametrize("arguments", [("gateway",), ("worker",), ("cluster", "up")])
def test_without_ray_it_says_what_to_install(monkeypatch, arguments):
    for name in [name for name in sys.modules if name.startswith("vlmserve.scaleout.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert "pip install 'vlmserve[ray]'" in " ".join(done.stderr.split())


@pytest.mark.parametrize("member", ["worker", "gateway"])
@pytest.mark.parametrize("url", ["memory", "sqlite:///history.db"])
def test_members_reject_an_unreachable_history(member, url):
    done = CliRunner().invoke(app, [member, "--storage-url", url])
    assert done.exit_code != 0
    assert "postgresql://" in done.stderr


def test_nothing_else_imports_ray():
    package = Path(__file__).parents[2] / "src" / "vlmserve"
    found = [
        path.relative_to(package).parts[:2]
        for path in package.rglob("*.py")
        if any(line.lstrip().startswith(("import ray", "from ray")) for line in path.read_text().splitlines())
    ]
    assert set(found) == {("scaleout", "ray")}
