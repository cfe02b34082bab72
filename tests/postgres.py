"""A PostgreSQL server of our own, on a socket in a temporary folder."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_USERS = ("postgres", "nobody")
"""PostgreSQL refuses to run as root; then one of these runs it."""


class Postgres:
    """A running server, which lives in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    def new_database(self) -> str:
        """The URL of a place without tables: a schema of its own, which is made and deleted faster than a database."""
        import psycopg

        name = f"history{next(self._numbers)}"
        with psycopg.connect(f"host={self._folder} user=tester dbname=postgres", autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return f"postgresql://tester@/postgres?host={self._folder}&options=-csearch_path%3D{name}"


@contextlib.contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Skips the test, and says why, where there is no PostgreSQL that can be started."""
    pytest.importorskip("psycopg")
    missing = [name for name in ("initdb", "pg_ctl", "postgres") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"PostgreSQL is not installed: no {', '.join(missing)}")
    folder = Path(tempfile.mkdtemp(prefix="vlmserve-pg-"))
    user = _user(folder)

    def run(*command: str) -> None:
        done = subprocess.run(command, user=user, cwd=folder, capture_output=True, text=True, timeout=120)
        if done.returncode:
            log = folder / "log"
            said = log.read_text() if log.exists() else done.stderr
            pytest.skip(f"PostgreSQL cannot be started here: {command[0]} says {said.strip()[-500:]}")

    data = str(folder / "data")
    try:
        run("initdb", "-D", data, "-U", "tester", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        options = f"-k {folder} -c listen_addresses= -c fsync=off -c shared_buffers=16MB"
        run("pg_ctl", "-D", data, "-l", str(folder / "log"), "-o", options, "-w", "start")
        yield Postgres(folder)
    finally:
        subprocess.run(["pg_ctl", "-D", data, "-m", "immediate", "stop"], user=user, cwd=folder, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def _user(folder: Path) -> str | None:
    """Who runs it, and owns the folder; None: whoever runs the tests."""
    if os.getuid() != 0:
        return None
    for name in _USERS:
        with contextlib.suppress(KeyError, PermissionError):
            entry = pwd.getpwnam(name)
            os.chown(folder, entry.pw_uid, entry.pw_gid)
            return name
    pytest.skip("PostgreSQL does not run as root, and there is no other user to run it")
