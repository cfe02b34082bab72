"""Databases that several connections and processes have open."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

from sqlalchemy import text

from vlmserve.storage.database import Database

LEAVE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
connection.close()
"""


def test_another_opening_keeps_the_locks(tmp_path: Path) -> None:
    """SQLite's last user deletes the log, so it must see that this process still uses it."""
    path = tmp_path / "history.db"
    with closing(Database(f"sqlite:///{path}", 1)) as first, first.read() as connection:
        connection.execute(text("SELECT count(*) FROM sqlite_master"))
        log = path.with_name("history.db-wal")
        used = log.stat().st_ino
        Database(f"sqlite:///{path}", 1).close()
        subprocess.run([sys.executable, "-c", LEAVE, str(path)], check=True)
        assert log.stat().st_ino == used
