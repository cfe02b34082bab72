"""Batches in both kinds of database: who works on them, what is kept, and when it goes."""

from __future__ import annotations

import itertools

import pytest
from sqlalchemy import func, select

from vlmserve.errors import InvalidRequestError, NotFoundError, OverloadedError, StorageFullError
from vlmserve.storage.batches import BatchResult
from vlmserve.storage.items import Page
from vlmserve.storage.store import Store
from vlmserve.storage.tables import batch_results, blobs

REQUESTS = b'{"custom_id": "a"}\n'
_ids = itertools.count()


def new_file_id() -> str:
    return f"file-{next(_ids)}"


def make(store: Store, id: str = "b", *, owner: str = "", seconds: float = 3600, most: int = 9, **fields):
    file = store.files.create(owner, new_file_id(), REQUESTS, "a.jsonl", "batch", "application/jsonl", None)
    values = {
        "tenant": "", "endpoint": "/v1/responses", "window": "1h", "seconds": seconds, "input_file_id": file.id,
        "output_lifetime": None, "metadata": {}, "most": most, **fields,
    }  # fmt: skip
    return store.batches.create(owner, id, **values)


def count(store: Store, table) -> int:
    with store.database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def result(row: int, text: str = "x", *, succeeded: bool = True) -> BatchResult:
    return BatchResult(row, succeeded, text.encode(), 3, 1, 2)


def test_one_server_at_a_time_has_a_batch(store, clock):
    make(store)
    assert [batch.id for batch in store.batches.claim("one", 10, 4)] == ["b"]
    assert store.batches.claim("two", 10, 4) == []
    assert store.batches.claim("one", 10, 4, ["b"]) == []
    clock.now += 6
    assert store.batches.hold("one", 10) == {"b": "validating"}
    clock.now += 6
    assert store.batches.claim("two", 10, 4) == []
    clock.now += 5
    assert [batch.id for batch in store.batches.claim("two", 10, 4)] == ["b"]
    assert store.batches.hold("one", 10) == {}
    assert store.batches.begin("one", "b", 1, None) is None
    assert store.batches.add("one", "b", [result(0)]) is None
    store.batches.end("one", "b", "completed", new_file_id)
    assert store.batches.get("", "b").status == "validating"
    assert count(store, batch_results) == 0
    store.batches.release("two")
    assert [batch.id for batch in store.batches.claim("three", 10, 4)] == ["b"]


def test_results_become_files_in_the_order_of_rows(store, clock):
    make(store, output_lifetime=7200.0)
    [batch] = store.batches.claim("one", 10, 4)
    assert store.batches.requests(batch) == REQUESTS
    assert store.batches.begin("one", "b", 4, "m") == "in_progress"
    assert store.batches.add("one", "b", [result(2, "two"), result(1, "one", succeeded=False)]) == "in_progress"
    store.batches.add("one", "b", [result(0, "nought\u00fc")])
    assert store.batches.rows_done("b") == {0, 1, 2}
    store.batches.end("one", "b", "expired", new_file_id, unanswered=[b"three"])
    batch = store.batches.get("", "b")
    assert (batch.status, batch.model, batch.num_rows) == ("expired", "m", 4)
    assert (batch.num_completed, batch.num_failed, batch.num_bytes) == (2, 2, 0)
    assert (batch.prompt_tokens, batch.cached_tokens, batch.completion_tokens) == (9, 3, 6)
    assert store.files.content("", batch.output_file_id) == "nought\u00fc\ntwo\n".encode()
    assert store.files.content("", batch.error_file_id) == b"one\nthree\n"
    assert store.files.get("", batch.output_file_id).expires_at == clock.now + 7200
    assert count(store, batch_results) == 0
    assert store.batches.claim("one", 10, 4) == []


def test_cancelled_batch_tells_its_worker(store):
    make(store)
    store.batches.claim("one", 10, 4)
    store.batches.begin("one", "b", 2, None)
    assert store.batches.cancel("", "b").status == "cancelling"
    assert store.batches.add("one", "b", [result(0)]) == "cancelling"
    assert store.batches.hold("one", 10) == {"b": "cancelling"}
    assert store.batches.begin("one", "b", 2, None) == "cancelling"
    store.batches.end("one", "b", "cancelled", new_file_id)
    with pytest.raises(InvalidRequestError, match="cancelled already"):
        store.batches.cancel("", "b")


def test_owner_sees_only_its_own_within_a_limit(store):
    make(store, "a", owner="x")
    make(store, "b", owner="y")
    for method in (store.batches.get, store.batches.cancel):
        with pytest.raises(NotFoundError):
            method("x", "b")
    assert [batch.id for batch in store.batches.list("x", Page())[0]] == ["a"]
    with pytest.raises(OverloadedError):
        make(store, "c", owner="x", most=1)
    make(store, "c", owner="x", most=2)
    with pytest.raises(NotFoundError):
        make(store, "d", owner="x", input_file_id=store.batches.get("y", "b").input_file_id)


def test_pages_are_newest_first(store, clock):
    for name in "abcde":
        clock.now += 1
        make(store, name)
    assert [one.id for one in store.batches.list("", Page(None, 2))[0]] == ["e", "d"]
    assert [one.id for one in store.batches.list("", Page("d", 9))[0]] == ["c", "b", "a"]
    assert store.batches.list("", Page("d", 2))[1]
    with pytest.raises(InvalidRequestError, match="after"):
        store.batches.list("", Page("nobody", 2))


def test_requests_are_kept_as_long_as_the_batch(store, open_store, clock):
    batch = make(store)
    store.files.delete("", batch.input_file_id)
    assert store.batches.requests(batch) == REQUESTS
    store.batches.claim("one", 10, 4)
    store.batches.end("one", "b", "failed", new_file_id, errors=[{"code": "wrong", "message": "x"}])
    assert store.batches.get("", "b").errors == [{"code": "wrong", "message": "x"}]
    keeper = open_store(storage_max_age=100)
    clock.now += 99
    assert keeper.retention.sweep() == 0
    clock.now += 2
    assert keeper.retention.sweep() == 1
    assert count(store, blobs) == 0


def test_unfinished_batches_last_until_their_window_ends(store, open_store, clock):
    make(store, seconds=500)
    store.batches.claim("one", 10, 4)
    store.batches.begin("one", "b", 2, None)
    store.batches.add("one", "b", [result(0)])
    keeper = open_store(storage_max_age=100)
    clock.now += 599
    keeper.retention.sweep()  # only the file, whose content the batch needs
    assert store.batches.requests(store.batches.get("", "b")) == REQUESTS
    clock.now += 2
    assert keeper.retention.sweep() == 1
    assert (count(store, batch_results), count(store, blobs)) == (0, 0)


def test_batch_with_unstorable_answers_has_not_ended(store, open_store):
    make(store)
    small = open_store(max_stored_bytes=len(REQUESTS) + 5)
    small.batches.claim("one", 10, 4)
    small.batches.begin("one", "b", 1, None)
    small.batches.add("one", "b", [result(0, "a long answer")])
    with pytest.raises(StorageFullError):
        small.batches.end("one", "b", "completed", new_file_id)
    assert store.batches.get("", "b").status == "in_progress"
    store.batches.end("one", "b", "completed", new_file_id)
    assert store.batches.get("", "b").status == "completed"
