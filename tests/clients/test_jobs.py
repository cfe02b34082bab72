"""The runner of client libraries in `tests.clients.run`."""

import contextlib
import sys
from types import SimpleNamespace

import pytest

from tests.clients import run as runner
from tests.clients.run import JOBS, ROOT, InstallError, JobError


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_job_has_its_script(job):
    assert (ROOT / job.script).is_file()


def test_docling_uses_the_projects_torch():
    [torch] = [package for package in JOBS["docling"].packages if package.startswith("torch==")]
    assert torch in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.fixture
def outcome(monkeypatch):
    """Run the light jobs without a server. Give each the error of its name, and return the exit status."""

    def of(**errors):
        def fake(name, url):
            ran.append(name)
            if name in errors:
                raise errors[name]

        ran = []
        monkeypatch.setattr(
            runner, "LiveServer", lambda *args, **options: contextlib.nullcontext(SimpleNamespace(url=""))
        )
        monkeypatch.setattr(runner, "run", fake)
        monkeypatch.setattr(sys, "argv", ["run", "--light"])
        status = runner.main()
        assert ran == [name for name, job in JOBS.items() if job.light]
        return status

    return of


def test_failed_job_fails_the_run(outcome):
    assert outcome() == 0
    assert outcome(openai=JobError("wrong answer")) == 1


def test_uninstallable_job_is_skipped(outcome, capsys):
    assert outcome(anthropic=InstallError("no index")) == 0
    assert "SKIP anthropic: no index" in capsys.readouterr().out


def test_run_without_an_installable_job_fails(outcome):
    assert outcome(**{name: InstallError("no index") for name in JOBS}) == 1


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", "raise SystemExit(3)"])
def test_slow_or_failing_command_is_an_error(program, tmp_path):
    with pytest.raises(JobError):
        runner.finish([sys.executable, "-c", program], tmp_path, 2)


def test_unexpected_output_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(runner, "install", lambda name: [sys.executable, "-c", "print('blue')"])
    (tmp_path / "openai").mkdir()
    with pytest.raises(JobError, match="does not match"):
        runner.run("openai", "http://127.0.0.1")


@pytest.mark.parametrize("uv", [None, "/usr/bin/uv"])
def test_uv_installs_packages_if_it_exists(uv, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(runner, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(runner.shutil, "which", lambda name: uv)
    monkeypatch.setattr(runner.venv, "create", lambda folder, symlinks: None)
    monkeypatch.setattr(runner, "finish", lambda command, *rest: commands.append(command))
    python, script = runner.install("cohere")
    [command] = commands
    assert command[:2] == ([uv, "pip"] if uv else [sys.executable, "-m"])
    assert command[-1] == "cohere"
    assert (python, script) == (tmp_path / "cohere/bin/python", ROOT / JOBS["cohere"].script)
