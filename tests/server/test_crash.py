"""kill -9 in the middle of many writes: what was acknowledged is there, whole, and the server starts again."""

from __future__ import annotations

import base64
import contextlib
import sqlite3
import threading
import time

import httpx
import pytest

from tests.server.test_chat import data_url
from tests.server.test_run import serving
from tests.waiting import wait_until

PNG = base64.b64decode(data_url("red").partition(",")[2])


class Writer(threading.Thread):
    """Writes until the server is gone; notes what was acknowledged."""

    def __init__(self, url: str, conversation: str, number: int) -> None:
        super().__init__(daemon=True)
        self.url = f"{url}/v1"
        self.conversation = conversation
        self.number = number
        self.files: list[str] = []
        self.answers: list[tuple[str, str, str]] = []
        """Ids of responses, what they were asked and what they answered."""
        self.start()

    def run(self) -> None:
        with httpx.Client(timeout=60) as client, contextlib.suppress(httpx.TransportError):
            while True:
                content = PNG + b"%d-%d" % (self.number, len(self.files))  # what is behind an image changes nothing
                form = {"files": {"file": ("a.png", content)}, "data": {"purpose": "vision"}}
                self.files.append(client.post(f"{self.url}/files", **form).raise_for_status().json()["id"])
                question = f"{self.number}-{len(self.answers)}"
                # Responses of this conversation are stored with their turn; what was said before is not asked for.
                body = {"input": question, "conversation": self.conversation, "max_output_tokens": 2,
                        "truncation": "auto"}  # fmt: skip
                answer = client.post(f"{self.url}/responses", json=body).raise_for_status().json()
                self.answers.append((answer["id"], question, answer["output"][0]["id"]))


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_nothing_acknowledged_is_lost(folder, tmp_path, database, request):
    path = tmp_path / "history.db"
    url = f"sqlite:///{path}" if database == "sqlite" else request.getfixturevalue("postgres").new_database()
    with serving(folder, in_thread=True, server={"storage_url": url}) as server:
        conversation = httpx.post(f"{server.url}/v1/conversations", json={}, timeout=60).json()["id"]
        writers = [Writer(server.url, conversation, number) for number in range(4)]
        wait_until(lambda: all(len(writer.answers) >= 5 for writer in writers))
        time.sleep(0.1)  # not at the end of a write
        server.process.kill()
        for writer in writers:
            writer.join(60)
            assert not writer.is_alive()

    if database == "sqlite":
        with contextlib.closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []

    with (
        serving(folder, in_thread=True, server={"storage_url": url}) as server,
        httpx.Client(timeout=60) as client,
    ):
        items, after = [], None
        while True:
            query = {"order": "asc", "limit": 100, **({"after": after} if after else {})}
            page = client.get(f"{server.url}/v1/conversations/{conversation}/items", params=query).json()
            items += page["data"]
            if not page["has_more"]:
                break
            after = page["last_id"]
        asked = {answer["id"]: question for question, answer in zip(items[::2], items[1::2], strict=True)}
        assert [item["role"] for item in items] == ["user", "assistant"] * (len(items) // 2)
        for writer in writers:
            for number, file in enumerate(writer.files):
                content = client.get(f"{server.url}/v1/files/{file}/content")
                assert content.content == PNG + b"%d-%d" % (writer.number, number)
            for response, question, answer in writer.answers:
                assert asked[answer]["content"][0]["text"] == question
                kept = client.get(f"{server.url}/v1/responses/{response}").json()
                assert kept["output"][0]["id"] == answer
        # At most the one that each was writing is there without having been acknowledged.
        assert len(items) // 2 - sum(len(writer.answers) for writer in writers) in range(len(writers) + 1)
        again = client.post(f"{server.url}/v1/responses", json={"input": "And now?"})
        assert again.status_code == 200
