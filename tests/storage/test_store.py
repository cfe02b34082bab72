"""What is kept comes back, to its owner only, until it is deleted; the same in SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import base64
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, inspect, select

from tests.storage.conftest import item, texts
from vlmserve.errors import (
    ConfigurationError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    StorageFullError,
)
from vlmserve.settings.config import ServerConfig
from vlmserve.storage import database as database_module
from vlmserve.storage import store as store_module
from vlmserve.storage.items import Page
from vlmserve.storage.retention import stored_bytes
from vlmserve.storage.store import Store
from vlmserve.storage.store import open_store as open_configured_store
from vlmserve.storage.tables import blobs, items, metadata, schema_version

MANY = 10**9
ALL = Page(limit=1000, ascending=True)


def image(name: str, size: int = 1000) -> str:
    data = name.encode() * (size // len(name))
    return "data:image/png;base64," + base64.b64encode(data).decode()


def count(store: Store, table) -> int:
    with store.database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def total(store: Store) -> int:
    with store.database.read() as connection:
        return stored_bytes(connection)


def answer(store: Store, name: str, previous: str | None = None, *, owner="", conversation=None, images=()) -> None:
    inputs, outputs = [item(f"question {name}", *images)], [item(f"answer {name}")]
    store.responses.save(owner, {"id": name, "status": "completed"}, inputs, outputs, conversation, previous)


def history(store: Store, name: str, owner: str = "") -> list[str]:
    return texts(store.responses.unpack(store.responses.history(owner, name)))


def test_failed_response_is_kept_beside_its_conversation(store):
    store.conversations.create("", "c", {}, [])
    answer(store, "a", conversation="c")
    for name in ("a", "b"):
        failed = {"id": name, "status": "failed"}
        store.responses.save("", failed, [item(f"question {name}", image("red"))], [], "c")
    assert store.responses.get("", "a")["status"] == "completed"
    assert store.responses.get("", "b") == {"id": "b", "status": "failed", "output": []}
    assert texts(store.responses.inputs("", "b", ALL, MANY)[0]) == ["question b"]
    assert texts(store.conversations.items("", "c", ALL, MANY)[0]) == ["question a", "answer a"]
    store.conversations.delete("", "c")
    assert count(store, items) == count(store, blobs) == 0


def test_conversation_pages_through_ordered_items(store):
    new = [item(f"item {number}") for number in range(7)]
    made = store.conversations.create("", "conv", {"topic": "shapes"}, new[:3])
    store.conversations.add("", "conv", new[3:])
    assert store.conversations.get("", "conv") == made
    assert made.metadata == {"topic": "shapes"}
    for ascending in (True, False):
        ids, page = [], Page(None, 3, ascending)
        while True:
            listed, has_more = store.conversations.items("", "conv", page, MANY)
            ids += [entry["id"] for entry in listed]
            if not has_more:
                break
            page = Page(ids[-1], 3, ascending)
        assert ids == [entry.id for entry in (new if ascending else new[::-1])]


def test_page_ends_early_with_large_images_but_advances(store):
    new = [item(f"item {number}", image(f"image {number}", 3000)) for number in range(4)]
    store.conversations.create("", "conv", {}, new)
    listed, has_more = store.conversations.items("", "conv", ALL, 9000)
    assert (len(listed), has_more) == (2, True)
    listed, has_more = store.conversations.items("", "conv", Page(listed[-1]["id"], 100, True), 1)
    assert (len(listed), has_more) == (1, True)
    listed, has_more = store.conversations.items("", "conv", Page(listed[-1]["id"], 100, True), 1)
    assert (len(listed), has_more) == (1, False)


def test_unknown_cursor_is_the_clients_fault(store):
    store.conversations.create("", "conv", {}, [item("one")])
    store.conversations.create("", "other", {}, [other := item("two")])
    for after in ("nothing", other.id, "nul\0"):
        with pytest.raises(InvalidRequestError) as caught:
            store.conversations.items("", "conv", Page(after), MANY)
        assert caught.value.param == "after"
    with pytest.raises(InvalidRequestError, match="after"):
        store.files.list("", Page("nothing"), None)


def test_responses_that_follow_each_other_have_one_history(store):
    answer(store, "a", images=[image("red")])
    answer(store, "b", "a")
    answer(store, "c", "b")
    answer(store, "branch", "a")
    said = ["question a", "answer a", "question b", "answer b", "question c", "answer c"]
    assert history(store, "c") == said
    assert history(store, "branch") == [*said[:2], "question branch", "answer branch"]
    assert store.responses.get("", "b")["output"][0]["content"][0]["text"] == "answer b"
    shown, _ = store.responses.inputs("", "a", ALL, MANY)
    assert shown[0]["content"][0]["image_url"] == image("red")


def test_deleted_response_is_named_to_its_followers(store):
    answer(store, "a")
    answer(store, "b", "a")
    store.responses.delete("", "a")
    with pytest.raises(NotFoundError, match="'a', which 'b' follows, was deleted"):
        store.responses.history("", "b")
    assert store.responses.get("", "b")["id"] == "b"
    for method in (store.responses.get, store.responses.delete, store.responses.history):
        with pytest.raises(NotFoundError):
            method("", "a")


def test_response_turn_outlives_the_response(store):
    store.conversations.create("", "conv", {}, [item("hello")])
    answer(store, "a", conversation="conv")
    stored = store.conversations.all_items("", "conv")
    assert texts(store.responses.unpack(stored)) == ["hello", "question a", "answer a"]
    with pytest.raises(InvalidRequestError, match="'conv'"):
        store.responses.history("", "a")
    store.responses.delete("", "a")
    assert len(store.conversations.all_items("", "conv")) == 3


def test_conversation_takes_items_and_responses_along(store):
    store.conversations.create("", "conv", {}, [item("hello", image("red"))])
    answer(store, "a", conversation="conv", images=[image("blue")])
    answer(store, "b", images=[image("blue")])
    store.conversations.delete("", "conv")
    for gone in (lambda: store.conversations.get("", "conv"), lambda: store.responses.get("", "a")):
        with pytest.raises(NotFoundError):
            gone()
    assert (count(store, items), count(store, blobs)) == (2, 1)
    store.responses.delete("", "b")
    assert (count(store, items), count(store, blobs), total(store)) == (0, 0, 0)


def test_deleted_item_leaves_its_response_too(store):
    store.conversations.create("", "conv", {}, [])
    answer(store, "a", conversation="conv", images=[image("red")])
    question, reply = store.conversations.all_items("", "conv")
    store.conversations.delete_item("", "conv", question.id)
    assert count(store, blobs) == 0
    assert store.responses.inputs("", "a", ALL, MANY) == ([], False)
    assert store.conversations.item("", "conv", reply.id)["id"] == reply.id
    for method in (store.conversations.item, store.conversations.delete_item):
        with pytest.raises(NotFoundError):
            method("", "conv", question.id)


def test_deleted_conversation_keeps_nothing_of_a_turn(store):
    with pytest.raises(NotFoundError):
        answer(store, "a", conversation="gone", images=[image("red")])
    assert (count(store, items), count(store, blobs)) == (0, 0)
    with pytest.raises(NotFoundError):
        store.responses.get("", "a")


def test_equal_content_is_stored_once_until_unused(store):
    data = b"image" * 100
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    store.files.create("me", "file-1", data, "a.png", "vision", "image/png", None)
    store.files.create("you", "file-2", data, "b.png", "vision", "image/png", None)
    answer(store, "a", images=[url, url])
    assert count(store, blobs) == 1
    store.files.delete("me", "file-1")
    store.files.delete("you", "file-2")
    assert store.responses.inputs("", "a", ALL, MANY)[0][0]["content"][0]["image_url"] == url
    store.responses.delete("", "a")
    assert count(store, blobs) == 0


def test_files_come_back_and_are_listed_by_age(store, clock):
    for number in range(5):
        purpose = "vision" if number % 2 else "user_data"
        store.files.create("", f"file-{number}", b"%d" % number, f"{number}.png", purpose, "image/png", None)
        clock.now += number // 2  # some are equally old
    assert store.files.content("", "file-3") == b"3"
    assert store.files.get("", "file-3").filename == "3.png"
    newest, _ = store.files.list("", Page(), None)
    assert [file.id for file in newest] == [f"file-{number}" for number in (4, 3, 2, 1, 0)]
    first, has_more = store.files.list("", Page(None, 2, True), None)
    rest, no_more = store.files.list("", Page(first[-1].id, 10, True), None)
    assert [file.id for file in first + rest] == [f"file-{number}" for number in range(5)]
    assert (has_more, no_more) == (True, False)
    assert [file.id for file in store.files.list("", Page(), "vision")[0]] == ["file-3", "file-1"]


def test_nobody_sees_or_touches_what_is_somebody_elses(store):
    store.conversations.create("me", "conv", {}, [mine := item("secret")])
    answer(store, "a", owner="me")
    store.files.create("me", "file-1", b"secret", "a.png", "vision", "image/png", None)
    for attempt in (
        lambda: store.conversations.get("you", "conv"),
        lambda: store.conversations.update("you", "conv", {}),
        lambda: store.conversations.delete("you", "conv"),
        lambda: store.conversations.add("you", "conv", [item("x")]),
        lambda: store.conversations.items("you", "conv", ALL, MANY),
        lambda: store.conversations.all_items("you", "conv"),
        lambda: store.conversations.item("you", "conv", mine.id),
        lambda: store.conversations.delete_item("you", "conv", mine.id),
        lambda: store.responses.get("you", "a"),
        lambda: store.responses.delete("you", "a"),
        lambda: store.responses.inputs("you", "a", ALL, MANY),
        lambda: store.responses.history("you", "a"),
        lambda: answer(store, "b", owner="you", conversation="conv"),
        lambda: store.files.get("you", "file-1"),
        lambda: store.files.content("you", "file-1"),
        lambda: store.files.delete("you", "file-1"),
    ):
        with pytest.raises(NotFoundError):
            attempt()
    assert store.files.list("you", Page(), None) == ([], False)
    answer(store, "c", "a", owner="you")  # its owner cannot see what it claims to follow
    with pytest.raises(NotFoundError):
        store.responses.history("you", "c")
    assert len(store.conversations.all_items("me", "conv")) == 1


def test_concurrent_turns_are_all_kept_together(store):
    store.conversations.create("", "conv", {}, [])
    start = threading.Barrier(4)

    def write(writer: int) -> None:
        start.wait()
        for number in range(10):
            answer(store, f"{writer}-{number}", conversation="conv")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    said = texts(store.responses.unpack(store.conversations.all_items("", "conv")))
    turns = list(zip(said[::2], said[1::2], strict=True))
    assert all(question.split()[1] == reply.split()[1] for question, reply in turns)
    assert len(set(turns)) == 40
    for writer in range(4):
        own = [int(question.split("-")[1]) for question, _ in turns if question.startswith(f"question {writer}-")]
        assert own == list(range(10))


def test_equal_images_survive_concurrent_deletion(store):
    start = threading.Barrier(4)

    def write_and_delete(writer: int) -> None:
        start.wait()
        for number in range(10):
            answer(store, f"{writer}-{number}", images=[image("red")])
            shown, _ = store.responses.inputs("", f"{writer}-{number}", ALL, MANY)
            assert shown[0]["content"][0]["image_url"] == image("red")
            store.responses.delete("", f"{writer}-{number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write_and_delete, range(4)))
    assert (count(store, items), count(store, blobs)) == (0, 0)


def test_long_unused_content_is_deleted(open_store, clock):
    store = open_store(storage_max_age=100)
    answer(store, "a")
    answer(store, "old", images=[image("red")])
    store.conversations.create("", "conv", {}, [item("hello")])
    store.conversations.create("", "old-conv", {}, [item("hello")])
    store.files.create("", "file-old", b"1", "a.png", "vision", "image/png", None)
    store.files.create("", "file-used", b"2", "a.png", "vision", "image/png", None)
    clock.now += 60
    store.responses.save("", {"id": "b"}, [item("question b")], [item("answer b")], None, "a", ["file-used"])
    answer(store, "c", conversation="conv")
    assert store.retention.sweep() == 0
    clock.now += 60
    assert store.retention.sweep() == 3
    assert len(history(store, "b")) == 4
    assert len(store.conversations.all_items("", "conv")) == 3
    assert [file.id for file in store.files.list("", Page(), None)[0]] == ["file-used"]
    for gone in (lambda: store.responses.get("", "old"), lambda: store.conversations.get("", "old-conv")):
        with pytest.raises(NotFoundError):
            gone()
    clock.now += 1000
    assert store.retention.sweep() == 3
    assert total(store) == 0


def test_expired_file_is_gone_at_once(store, clock):
    store.files.create("", "file-1", b"1", "a.png", "vision", "image/png", 3600)
    clock.now += 3599
    assert store.files.get("", "file-1").expires_at == clock.now + 1
    clock.now += 1
    with pytest.raises(NotFoundError):
        store.files.content("", "file-1")
    assert store.files.list("", Page(), None) == ([], False)
    assert count(store, blobs) == 1
    assert store.retention.sweep() == 1
    assert count(store, blobs) == 0


def test_oldest_goes_first_when_full(open_store, clock):
    store = open_store(storage_max_bytes=10_000)
    for number in range(50):
        answer(store, f"r{number}", images=[image(f"image {number}", 900)])
        clock.now += 1
    before = total(store)
    deleted = store.retention.sweep()
    assert deleted == -(-(before - 10_000) * 50 // before)
    assert 8000 < total(store) <= 10_000
    for number in range(50):
        if number < deleted:
            with pytest.raises(NotFoundError):
                store.responses.get("", f"r{number}")
        else:
            store.responses.get("", f"r{number}")
    assert store.retention.sweep() == 0


def test_without_bounds_nothing_is_deleted(open_store, clock):
    store = open_store(storage_max_bytes=0, storage_max_age=0)
    answer(store, "a")
    clock.now += 10**9
    assert store.retention.sweep() == 0


def test_oversized_content_is_rejected_leaving_nothing(open_store):
    store = open_store(max_stored_bytes=2500)
    store.files.create("", "file-1", b"1" * 2000, "a.png", "vision", "image/png", None)
    for refused in (
        lambda: store.files.create("", "file-2", b"2" * 1000, "a.png", "vision", "image/png", None),
        lambda: answer(store, "a", images=[image("red")]),
        lambda: store.conversations.create("", "conv", {}, [item("hello", image("red"))]),
        lambda: store.responses.check_room([item("hello", image("red"))]),
    ):
        with pytest.raises(StorageFullError, match="2,500 bytes"):
            refused()
    assert (count(store, items), count(store, blobs)) == (0, 1)
    store.files.create("", "file-3", b"1" * 2000, "a.png", "vision", "image/png", None)  # the same once more
    store.files.delete("", "file-1")
    store.files.delete("", "file-3")
    answer(store, "a", images=[image("red")])


def test_all_is_there_after_closing_and_opening_again(open_store):
    first = open_store()
    answer(first, "a", images=[image("red")])
    assert history(open_store(), "a") == ["question a", "answer a"]


def test_tables_of_another_version_are_refused(store, url, open_store):
    store.database.write(lambda connection: connection.execute(schema_version.update().values(version=99)))
    with pytest.raises(ConfigurationError, match=r"another vlmserve .*--storage-url"):
        open_store()


def test_several_servers_may_open_a_new_database(url, clock):
    with ThreadPoolExecutor(3) as pool:
        stores = list(pool.map(lambda _: Store(url, ServerConfig(), clock), range(3)))
    answer(stores[0], "a")
    assert history(stores[2], "a") == ["question a", "answer a"]
    for store in stores:
        store.close()


def test_concurrently_made_setting_is_retried(monkeypatch):
    tried = []

    class Cursor:
        def execute(self, setting: str) -> None:
            tried.append(setting)
            if len(tried) < 3:
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = sqlite3.SQLITE_BUSY
                raise error

    database_module.set_sqlite(Cursor(), "PRAGMA x")
    assert tried == ["PRAGMA x"] * 3
    monkeypatch.setattr(database_module, "SQLITE_TIMEOUT", 0)
    tried.clear()
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        database_module.set_sqlite(Cursor(), "PRAGMA x")


def test_unstorable_names_name_nothing(store):
    for name in ("nul\0", "\udc80", "x" * 5000, "'; DROP TABLE items; --"):
        for find in (store.responses.get, store.conversations.get, store.files.get):
            with pytest.raises(NotFoundError):
                find("", name)


async def test_excess_work_is_rejected_and_resumes_later(store, monkeypatch):
    gate = threading.Event()
    waiting = [asyncio.ensure_future(store.run(gate.wait)) for _ in range(store_module.MAX_PENDING + 1)]
    await asyncio.sleep(0)
    gate.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[-1], OverloadedError)
    assert results.count(True) == store_module.MAX_PENDING
    assert await store.run(store.retention.sweep) == 0


def test_the_sweeper_deletes_by_itself(open_store, clock):
    store = open_store(storage_max_age=100, storage_sweep_interval=0.02)
    answer(store, "a")
    clock.now += 200
    gone = threading.Event()
    for _ in range(1000):
        if count(store, items) == 0:
            break
        gone.wait(0.02)
    assert count(store, items) == 0


def test_deleted_content_leaves_no_trace_on_disk(tmp_path, clock):
    path = tmp_path / "history.db"
    store = Store(f"sqlite:///{path}", ServerConfig(storage_max_age=10), clock)
    secret = "a word that stands nowhere else"
    store.responses.save("", {"id": "a"}, [item(secret * 500, image("red", 500_000))], [item("answer")])
    answer(store, "b")
    path.with_name("history.db-reserve").unlink()  # which is as large as ever
    large = sum(file.stat().st_size for file in tmp_path.iterdir())
    clock.now += 5
    answer(store, "c")
    store.responses.delete("", "b")
    clock.now += 6
    assert store.retention.sweep() == 1
    store.close()
    left = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert secret.encode() not in left
    assert b"redredred" not in left
    assert b"question c" in left
    assert len(left) < large / 2


def test_memory_store_ends_with_the_server():
    store = open_configured_store(ServerConfig(storage_url="memory"))
    assert store is not None
    answer(store, "a", images=[image("red")])
    assert history(store, "a") == ["question a", "answer a"]
    store.close()


def test_settings_choose_the_store(tmp_path, monkeypatch, caplog):
    assert open_configured_store(ServerConfig(storage_url="none")) is None
    path = tmp_path / "new" / "folder" / "mine.db"
    store = open_configured_store(ServerConfig(storage_path=str(path)))
    store.close()
    assert path.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    open_configured_store(ServerConfig()).close()
    assert (tmp_path / "data/vlmserve/history.db").is_file()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert open_configured_store(ServerConfig()) is None
    assert "are not kept" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"storage_url": "nonsense"}, "no URL"),
        ({"storage_url": "mysql://host/name"}, "SQLite or PostgreSQL"),
        ({"storage_url": "postgresql://nobody:secret@127.0.0.1:1/none"}, "cannot be opened"),
        ({"storage_path": "/proc/nothing/history.db"}, "cannot be made"),
        ({"storage_path": "/tmp/a.db", "storage_url": "memory"}, "not both"),
    ],
)
def test_unopenable_store_is_a_wrong_setting(settings, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        open_configured_store(ServerConfig(**settings))
    assert "secret" not in str(caught.value)


def test_non_database_file_is_a_wrong_setting(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("Dear diary, " * 1000)
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        open_configured_store(ServerConfig(storage_path=str(path)))
    assert path.read_text() == "Dear diary, " * 1000


def test_every_table_of_the_first_version_is_made(store):
    with store.database.read() as connection:
        made = inspect(connection)
        for table in metadata.tables.values():
            columns = {column["name"] for column in made.get_columns(table.name)}
            assert columns == {column.name for column in table.columns}
