"""Workloads: of the lengths that were asked for, and the same for a seed."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from vlmserve.errors import ConfigurationError
from vlmserve.loadtest.perform import arrival_times
from vlmserve.loadtest.settings import LoadConfig, WorkloadConfig
from vlmserve.loadtest.text import Vocabulary
from vlmserve.loadtest.workload import Session, digest, make_workload


def make(vocabulary: Vocabulary | None = None, is_chat: bool = True, salt: int = 0, **fields) -> list[Session]:
    return make_workload(WorkloadConfig(**fields), vocabulary or Vocabulary(), is_chat=is_chat, salt=salt)


def messages(session: Session) -> list[dict]:
    return [json.loads(b"".join(turn.content)) for turn in session.turns]


def images(session: Session) -> list[str]:
    parts = messages(session)[0]["content"]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def test_a_seed_says_it_all():
    fields = {"num_prompts": 5, "images": 1, "image_size": ("40x30",), "random_range_ratio": 0.5, "turns": 2}
    assert digest(make(**fields)) == digest(make(**fields))
    assert digest(make(**fields)) != digest(make(seed=1, **fields))
    assert digest(make(**fields)) != digest(make(salt=1, **fields))


@pytest.mark.parametrize("costs", [{"a": 1, "b": 2}, {"a": 3, "b": 1, "c": 7}, {"a": 2, "b": 5}])
@pytest.mark.parametrize("wanted", [1, 2, 17, 400])
def test_texts_cost_what_was_asked_for(costs, wanted):
    vocabulary = Vocabulary(costs, anchor=1)
    text, told = vocabulary.text(np.random.default_rng(0), wanted)
    spent = 1 + sum(costs[word] for word in text.split()[1:])
    assert spent == told
    assert wanted - min(costs.values()) < spent <= wanted


def test_lengths_spread_evenly_over_their_range():
    sessions = make(num_prompts=500, random_input_len=100, random_output_len=20, random_range_ratio=0.2)
    inputs = [len(messages(session)[0]["content"].split()) for session in sessions]
    outputs = [session.turns[0].max_tokens for session in sessions]
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (80, 120, 16, 24)
    assert np.mean(inputs) == pytest.approx(100, abs=2)


def test_prefixes_are_shared_and_take_turns():
    texts = [messages(s)[0]["content"] for s in make(num_prompts=6, random_prefix_len=20, num_prefixes=2)]
    heads = [" ".join(text.split()[:20]) for text in texts]
    assert heads[0] == heads[2] == heads[4] != heads[1] == heads[3]
    assert len(set(texts)) == 6


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_images_are_images(kind):
    [session] = make(num_prompts=1, images=2, image_size=("60x40",), image_format=kind)
    assert session.num_images == 2
    for url in images(session):
        image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
        assert (image.size, image.format) == ((60, 40), kind.upper())


@pytest.mark.parametrize(("reuse", "low", "high"), [(0.0, 400, 400), (0.5, 170, 230), (1.0, 1, 1)])
def test_images_repeat_at_the_requested_rate(reuse, low, high):
    sessions = make(num_prompts=400, images=1, image_size=("8x8",), image_reuse=reuse)
    assert low <= len({url for session in sessions for url in images(session)}) <= high


def test_turns_have_images_at_the_first_only():
    [session] = make(num_prompts=1, turns=3, images=1, image_size=("8x8",))
    first, *later = messages(session)
    assert isinstance(first["content"], list)
    assert all(isinstance(message["content"], str) for message in later)
    assert len(later) == 2


def test_dataset_is_sent_in_order_and_repeated(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    path = tmp_path / "requests.jsonl"
    lines = [
        {"prompt": "one", "max_tokens": 3, "images": ["a.png", "https://example.com/b.png"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}], "output_tokens": 4},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    sessions = make(dataset_path=str(path), num_prompts=3)
    assert [session.turns[0].max_tokens for session in sessions] == [3, 4, 3]
    assert images(sessions[0])[0].startswith("data:image/png;base64,")
    assert images(sessions[0])[1] == "https://example.com/b.png"
    assert json.loads(b"[" + b"".join(sessions[1].turns[0].content) + b"]") == lines[1]["messages"]
    assert len(make(dataset_path=str(path))) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1"),
        ("{}", "either prompt or messages"),
        ('{"prompt": 3}', "line 1"),
        ('{"prompt": "a", "images": ["none.png"]}', "none.png"),
        ('{"messages": [], "images": ["a"]}', "content parts"),
        ("", "the file is empty"),
    ],
)
def test_a_broken_dataset_says_where(tmp_path, line, words):
    path = tmp_path / "requests.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigurationError, match=words):
        make(dataset_path=str(path))


def test_what_does_not_go_together_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="neither images nor turns"):
        make(is_chat=False, images=1)
    with pytest.raises(ConfigurationError, match="640x480"):
        make(images=1, image_size=("large",))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        make(dataset_path=str(tmp_path / "none"))


# Arrivals


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, float("inf")])
def test_requests_come_at_their_rate_however_bursty(burstiness):
    times = arrival_times(LoadConfig(request_rate=20, burstiness=burstiness), 2000, seed=0)
    assert (np.diff(times) >= 0).all()
    assert times[-1] == pytest.approx(100, rel=0.01)
    gaps = np.diff(times)
    wanted = 0 if np.isinf(burstiness) else burstiness**-0.5
    assert gaps.std() / gaps.mean() == pytest.approx(wanted, rel=0.15, abs=1e-6)


def test_arrivals_are_the_seeds():
    load = LoadConfig(request_rate=3)
    assert (arrival_times(load, 9, 1) == arrival_times(load, 9, 1)).all()
    assert (arrival_times(load, 9, 1) != arrival_times(load, 9, 2)).any()


def test_all_at_once():
    assert arrival_times(LoadConfig(request_rate=float("inf")), 3, 0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_ramps_begin_and_end_at_their_rates(strategy):
    load = LoadConfig(ramp_up_strategy=strategy, ramp_up_start_rps=2, ramp_up_end_rps=50, burstiness=float("inf"))
    times = arrival_times(load, 3000, 0)
    rates = 1 / np.diff(times)
    assert (rates[0], rates[-1]) == (pytest.approx(2, rel=0.1), pytest.approx(50, rel=0.1))
    middle = rates[np.searchsorted(times, times[-1] / 2)]
    assert middle == pytest.approx(26 if strategy == "linear" else 10, rel=0.05)


def test_a_ramp_needs_its_rates():
    with pytest.raises(ConfigurationError, match="--ramp-up-start-rps"):
        arrival_times(LoadConfig(ramp_up_strategy="linear"), 3, 0)
    both = LoadConfig(ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=2, request_rate=3)
    with pytest.raises(ConfigurationError, match="one of the two"):
        arrival_times(both, 3, 0)
