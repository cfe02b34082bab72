"""API keys at rest, and what their accounts may spend."""

from __future__ import annotations

import json
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.clock import Clock
from vlmserve.cli import app
from vlmserve.errors import ConfigurationError
from vlmserve.server.accounts import Account, Bucket, KeyRing, duration
from vlmserve.server.errors import RefusedError
from vlmserve.server.keys import add_key, read_keys, remove_key, salted, store
from vlmserve.settings.config import ServerConfig
from vlmserve.storage.store import open_store


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_key_file_stores_a_hash_only(tmp_path):
    path = tmp_path / "keys" / "api-keys.jsonl"
    key = add_key(path, "alice", max_concurrency=2)
    [stored] = read_keys(path)
    assert stored.matches(key)
    assert not stored.matches(key[:-1])
    assert stored.max_concurrency == 2
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_equal_keys_have_different_hashes_and_cache_salts():
    first, second = store("the same", "a"), store("the same", "b")
    assert first.hash != second.hash
    assert salted(first.tenant, "") != salted(second.tenant, "")


def test_comments_and_other_keys_survive_changes(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\n\n")
    keys = {name: add_key(path, name) for name in ("alice", "bob", "carol")}
    remove_key(path, "bob")
    assert path.read_text().startswith("# ours\n\n")
    assert {key.name for key in read_keys(path)} == {"alice", "carol"}
    assert all(key.matches(keys[key.name]) for key in read_keys(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("alice", "line 2: JSON is malformed"),
        ('{"name": "alice"}', "line 2: Object missing required field `salt`"),
        ('{"name": "alice", "salt": "00", "hash": "00"}', "the salt must have 16 bytes"),
        ('{"name": "alice", "salt": "xy", "hash": "00"}', "salt"),
        ('{"name": "alice", "salt": "00", "hash": "00", "max_concurency": 1}', "max_concurency"),
        ('{"name": "alice", "salt": "00", "hash": "00", "max_concurrency": 0}', ">= 1"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    path = tmp_path / "keys"
    path.write_text(f"# keys\n{line}\n")
    with pytest.raises(ConfigurationError, match="line 2") as caught:
        read_keys(path)
    assert message in str(caught.value)


def test_two_keys_cannot_have_one_name(tmp_path):
    path = tmp_path / "keys"
    add_key(path, "alice")
    with pytest.raises(ConfigurationError, match="alice"):
        add_key(path, "alice")
    path.write_text(path.read_text() * 2)
    with pytest.raises(ConfigurationError, match="two keys with the name alice"):
        read_keys(path)


def test_concurrent_commands_do_not_lose_a_key(tmp_path):
    path = tmp_path / "keys"
    (tmp_path / "keys.new").touch()
    with pytest.raises(ConfigurationError, match="another command"):
        add_key(path, "alice")
    assert not path.exists()


def test_commands_add_list_and_remove(tmp_path):
    path = str(tmp_path / "keys")

    def run(*arguments: str, exit_code: int = 0) -> str:
        result = CliRunner().invoke(app, ["keys", *arguments, "--api-keys-file", path])
        assert result.exit_code == exit_code, result.output
        return result.stdout

    key = run("add", "alice", "--requests-per-minute", "5").strip()
    assert read_keys(tmp_path / "keys")[0].matches(key)
    assert "alice" in run("list")
    assert key not in run("list")
    run("remove", "alice")
    assert "alice" not in run("list")
    run("remove", "alice", exit_code=2)
    run("add", "no spaces", exit_code=2)


def test_added_key_warns_about_history_of_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    history = tmp_path / "vlmserve" / "history.db"

    def added(name: str, *arguments: str) -> str:
        path = str(tmp_path / f"keys-{len(list(tmp_path.iterdir()))}")
        result = CliRunner().invoke(app, ["keys", "add", name, "--api-keys-file", path, *arguments])
        assert result.exit_code == 0, result.output
        return result.stderr

    assert "earlier key" not in added("alice")
    assert not history.exists()
    store = open_store(ServerConfig())
    store.conversations.create("key alice", "conv_1", {}, [])
    store.close()
    assert "An earlier key alice has stored" in added("alice")
    assert "earlier key" not in added("bob")
    assert "earlier key" not in added("alice", "--storage-url", "none")
    assert "An earlier key alice has stored" in added("alice", "--storage-path", str(history))
    assert "is unknown" in added("alice", "--storage-url", "nonsense://x")


def test_ring_finds_plain_and_stored_keys_only(tmp_path):
    path = tmp_path / "keys"
    key = add_key(path, "alice")
    ring = KeyRing(["plain", "other"], path)
    assert ring.find(key).name == "alice"
    assert ring.find("other").name == "api-key-2"
    for wrong in ("", "Plain", "plain ", key[:-1], "x" * 100_000, "\ud800", "kräftig"):
        assert ring.find(wrong) is None


@pytest.mark.parametrize("key", ["", "x" * 513])
def test_a_key_that_nobody_could_send_is_refused(key):
    with pytest.raises(ConfigurationError, match="1 to 512"):
        KeyRing([key], None)


def test_there_is_a_ring_if_settings_name_keys(tmp_path):
    assert KeyRing.of(ServerConfig()) is None
    ring = KeyRing.of(ServerConfig(api_key=("one", "two")))
    assert ring.find("two") is not None
    assert "two" not in repr(ServerConfig(api_key=("one", "two")))
    path = tmp_path / "keys"
    path.touch()
    assert KeyRing.of(ServerConfig(api_keys_file=str(path))) is not None


def test_changed_file_is_reread_and_usage_is_kept(tmp_path, clock):
    path = tmp_path / "keys"
    alice = add_key(path, "alice", requests_per_minute=1)
    ring = KeyRing([], path, clock)
    with ring.find(alice).admit():
        pass
    bob = add_key(path, "bob")
    assert ring.find(bob) is None, "it looks once a second"
    clock.now += 1
    assert ring.find(bob).name == "bob"
    with pytest.raises(RefusedError), ring.find(alice).admit():
        pass
    remove_key(path, "alice")
    clock.now += 1
    assert ring.find(alice) is None
    assert ring.find(bob) is not None


@pytest.mark.parametrize("damage", ["garbage", "gone"])
def test_a_file_that_becomes_unreadable_changes_nothing(tmp_path, clock, caplog, damage):
    path = tmp_path / "keys"
    key = add_key(path, "alice")
    ring = KeyRing([], path, clock)
    path.write_text("{") if damage == "garbage" else path.unlink()
    for _ in range(3):
        clock.now += 1
        assert ring.find(key) is not None
    assert caplog.text.count("The API keys stay as they were") == 1


def test_a_file_without_keys_lets_nobody_in(tmp_path):
    path = tmp_path / "keys"
    path.touch()
    assert KeyRing([], path).find("anything") is None


def account(clock: Clock, **limits: int) -> Account:
    return Account(store("key", "alice", **limits), clock)


@given(st.integers(1, 500), st.lists(st.floats(0, 30), max_size=30))
def test_rejected_request_succeeds_after_the_told_time(per_minute, pauses):
    clock = Clock()
    asking = account(clock, requests_per_minute=per_minute)
    for pause in (*pauses, *[0.0] * (per_minute + 1)):
        clock.now += pause
        try:
            with asking.admit():
                pass
        except RefusedError as refusal:
            wait = refusal.retry_after
            assert 0 < wait <= 60 / per_minute + 1e-6
            clock.now += wait * 0.98
            with pytest.raises(RefusedError), asking.admit():
                pass
            clock.now += wait * 0.02 + 1e-6
            with asking.admit():
                pass


def test_request_limit_holds_after_the_first_minute(clock):
    asking = account(clock, requests_per_minute=30)
    admitted = []
    for _ in range(3000):
        clock.now += 0.1
        try:
            with asking.admit():
                admitted.append(clock.now)
        except RefusedError:
            continue
    late = [moment for moment in admitted if moment > admitted[0] + 60]
    assert len(late) == pytest.approx(30 * 4, abs=1)


def test_tokens_are_paid_afterwards_as_debts(clock):
    asking = account(clock, tokens_per_minute=60)
    with asking.admit():
        asking.charge(100)
    with pytest.raises(RefusedError) as refused, asking.admit():
        pass
    assert refused.value.retry_after == pytest.approx(41)
    assert refused.value.headers["x-ratelimit-remaining-tokens"] == "0"
    assert refused.value.headers["x-ratelimit-reset-tokens"] == "1m40s"
    clock.now += 41.001
    with asking.admit():
        pass


def test_concurrency_counts_what_is_under_way(clock):
    asking = account(clock, max_concurrency=2)
    with asking.admit(), asking.admit():
        with pytest.raises(RefusedError, match="2 running requests"), asking.admit():
            pass
        assert asking.num_running == 2
    with asking.admit():
        assert asking.num_running == 1


def test_what_one_limit_refuses_takes_nothing_of_another(clock):
    asking = account(clock, max_concurrency=1, requests_per_minute=2)
    with asking.admit(), pytest.raises(RefusedError), asking.admit():
        pass
    with asking.admit():
        pass


def test_bucket_never_exceeds_a_minutes_worth(clock):
    bucket = Bucket(10, clock)
    clock.now += 3600
    assert bucket.level == 10
    bucket.take(15)
    assert bucket.seconds_until(1) == pytest.approx(36)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (1.5, "1.5s"), (360, "6m0s"), (61.5, "1m1.5s")]
)
def test_durations_look_like_openais(seconds, text):
    assert duration(seconds) == text


def test_salts_depend_on_key_and_request():
    alice, bob = store("a", "alice"), store("b", "bob")
    salts = {salted(key.tenant, own) for key in (alice, bob) for own in ("", "x", "y")}
    assert len(salts) == 6
    assert salted(alice.tenant, "x") == salted(alice.tenant, "x")
    team = [salted(store(key, key, cache_salt="team").tenant, "x") for key in "ab"]
    assert team[0] == team[1] != salted(alice.tenant, "x")


def test_the_file_is_lines_of_json(tmp_path):
    path = tmp_path / "keys"
    add_key(path, "alice", tokens_per_minute=5)
    [line] = path.read_text().splitlines()
    assert set(json.loads(line)) == {"name", "salt", "hash", "created", "tokens_per_minute"}
    assert len(bytes.fromhex(json.loads(line)["hash"])) == 32


def test_history_belongs_to_a_name_or_unnamed_key(tmp_path, clock):
    path = tmp_path / "keys"
    first = add_key(path, "api-key-1")
    ring = KeyRing(["one", "two"], path, clock)
    owners = [ring.find(key).owner for key in ("one", "two", first)]
    assert len(set(owners)) == 3
    assert KeyRing(["two"], None, clock).find("two").owner == owners[1], "whatever other keys there are"
    remove_key(path, "api-key-1")
    again = add_key(path, "api-key-1")
    assert KeyRing([], path, clock).find(again).owner == owners[2]
