"""What the engine refuses, and what it leaves behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.checkpoints import make_llama, make_llava
from vlmserve.engine.engine import Engine
from vlmserve.errors import (
    ConfigurationError,
    InvalidImageError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    TooManyImagesError,
)
from vlmserve.settings.config import EngineConfig
from vlmserve.types import EngineRequest, ImageInput, ImageSpan, Prompt, SamplingParams

SETTINGS = {"kv_cache_memory": "1MiB", "dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llava_folder(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture
def engine(folder):
    return Engine(EngineConfig(model=str(folder), **SETTINGS), folder)


def request(name="a", tokens=(5, 6, 7), images=(), **params) -> EngineRequest:
    params = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, **params}
    return EngineRequest(name, Prompt(list(tokens), tuple(images)), SamplingParams(**params))


def finish(engine: Engine) -> dict[str, str]:
    reasons = {}
    while engine.has_work():
        reasons |= {out.request_id: out.finish_reason for out in engine.step() if out.finish_reason}
    return reasons


def make_image(num_tokens=4, key=b"k" * 32) -> ImageInput:
    return ImageInput(key, np.zeros((1, 3, 28, 28), np.float32), num_tokens)


def test_a_prompt_must_leave_room_for_one_token(engine):
    longest = engine.info.max_prompt_len
    with pytest.raises(PromptTooLongError, match=f"{longest + 1} tokens.*has {longest + 1} input tokens"):
        engine.add(request(tokens=[5] * (longest + 1)))
    engine.add(request(tokens=[5] * longest))
    assert finish(engine) == {"a": "length"}


def test_an_answer_ends_where_the_context_ends(folder):
    engine = Engine(EngineConfig(model=str(folder), **SETTINGS, max_model_len=20), folder)
    engine.add(request(tokens=[5] * 10, max_tokens=None))
    tokens = 0
    while engine.has_work():
        tokens += sum(len(out.token_ids) for out in engine.step())
    assert tokens == 10


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(tokens=[]), "empty"),
        (request(tokens=[-1]), "token id -1 at position 0 is not in the vocabulary"),
        (request(tokens=[5, 10**6]), "token id 1000000 at position 1 is not in the vocabulary"),
    ],
)
def test_a_bad_prompt_spares_the_next_request(engine, bad, message):
    with pytest.raises(InvalidRequestError, match=message):
        engine.add(bad)
    engine.add(request())
    assert finish(engine) == {"a": "length"}


def test_text_models_reject_images(engine):
    with pytest.raises(TooManyImagesError, match="takes no"):
        engine.add(request(tokens=[5] * 8, images=[ImageSpan(make_image(), 0)]))


@pytest.mark.parametrize(
    "spans",
    [
        [ImageSpan(make_image(), 6)],
        [ImageSpan(make_image(), 0), ImageSpan(make_image(), 3)],
        [ImageSpan(make_image(num_tokens=0), 0)],
    ],
)
def test_images_that_do_not_fit_are_rejected(llava_folder, spans):
    engine = Engine(EngineConfig(model=str(llava_folder), **SETTINGS), llava_folder)
    with pytest.raises(InvalidRequestError, match="overlap or do not fit"):
        engine.add(request(tokens=[5] * 8, images=spans))


@pytest.mark.parametrize(("size", "num_tokens", "message"), [(28, 9, "takes images of"), (42, 4, "9 embeddings")])
def test_a_bad_image_spares_the_next_request(llava_folder, size, num_tokens, message):
    engine = Engine(EngineConfig(model=str(llava_folder), **SETTINGS), llava_folder)
    wrong = ImageInput(b"k" * 32, np.zeros((1, 3, size, size), np.float32), num_tokens)
    with pytest.raises(InvalidImageError, match=message):
        engine.add(request(tokens=[5] * 12, images=[ImageSpan(wrong, 0)]))
    engine.add(request())
    assert finish(engine) == {"a": "length"}


@pytest.mark.parametrize("text", [((1, 6),), ((2, 5),), ((9, 5),), ((3, 5), (1, 5)), ((1, 5), (1, 5)), ((-9, 5),)])
def test_text_outside_the_prompt_is_rejected(llava_folder, text):
    engine = Engine(EngineConfig(model=str(llava_folder), **SETTINGS), llava_folder)
    image = ImageInput(b"k" * 32, np.zeros((1, 3, 42, 42), np.float32), 9 + len(text), text=text)
    with pytest.raises(InvalidRequestError, match="text inside an image"):
        engine.add(request(tokens=[7, 5, 7, 5, *[7] * 8], images=[ImageSpan(image, 0)]))


def test_text_inside_images_is_of_the_vocabulary(llava_folder):
    engine = Engine(EngineConfig(model=str(llava_folder), **SETTINGS), llava_folder)
    for token, fits in ((5, True), (10**6, False)):
        image = ImageInput(b"k" * 32, np.zeros((1, 3, 42, 42), np.float32), 10, text=((4, token),))
        tokens = [*[10**6] * 4, token, *[10**6] * 5, 7]
        if fits:
            engine.add(request(tokens=tokens, images=[ImageSpan(image, 0)]))
            assert finish(engine) == {"a": "length"}
        else:
            with pytest.raises(InvalidRequestError, match="token id 1000000 at position 4"):
                engine.add(request(tokens=tokens, images=[ImageSpan(image, 0)]))


def test_an_id_in_use_is_refused(engine):
    engine.add(request("same"))
    with pytest.raises(InvalidRequestError, match="'same' is in use"):
        engine.add(request("same"))
    assert finish(engine) == {"same": "length"}
    engine.add(request("same"))


def test_a_full_queue_is_refused_and_drains(folder):
    engine = Engine(EngineConfig(model=str(folder), **SETTINGS, max_waiting=2, max_num_seqs=1), folder)
    for name in "abc":
        engine.add(request(name))
    with pytest.raises(OverloadedError, match="3 requests are waiting"):
        engine.add(request("d"))
    assert set(finish(engine)) == {"a", "b", "c"}
    engine.add(request("d"))


def test_aborts_free_every_block_at_once(engine):
    for name in "abc":
        engine.add(request(name, tokens=[5] * 50, max_tokens=50))
    engine.step()
    engine.abort(["a", "b", "c", "unknown"])
    assert not engine.has_work()
    assert engine.step() == []
    assert engine.stats().kv_blocks_used == 0
    assert engine.stats().num_running == 0


def test_min_tokens_keeps_end_tokens_away(engine):
    engine.add(request(tokens=[5, 6]))
    (first,) = engine.step()
    engine.abort(["a"])
    end = first.token_ids[0]
    engine.add(request("stops", tokens=[5, 6], stop_token_ids=(end,)))
    (output,) = engine.step()
    assert (output.finish_reason, output.stop_token_id, output.token_ids) == ("stop", end, [])
    engine.add(request("goes on", tokens=[5, 6], stop_token_ids=(end,), min_tokens=3))
    tokens = []
    while engine.has_work():
        for output in engine.step():
            tokens += output.token_ids
    assert len(tokens) >= 3
    assert end not in tokens[:3]


def test_nan_logits_end_their_request_only(engine, monkeypatch):
    original = engine.runner.logits_of

    def poisoned(batch):
        logits = original(batch)
        logits[0] = torch.nan
        return logits

    engine.add(request("bad", max_tokens=1))
    engine.add(request("good", max_tokens=1))
    monkeypatch.setattr(engine.runner, "logits_of", poisoned)
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs["bad"].finish_reason == "error"
    assert "not a number" in outputs["bad"].error
    assert outputs["good"].finish_reason == "length"
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize("idle_steps", [0, 1])
def test_nan_does_not_reach_a_blocks_next_owner(folder, idle_steps):
    engine = Engine(EngineConfig(model=str(folder), **SETTINGS, max_num_seqs=1, max_model_len=32), folder)
    assert engine.stats().kv_blocks_total == 2, "so that the second request must get the first one's blocks"
    decoder = engine.runner.model.language_model
    embed = decoder.embed
    decoder.embed = lambda token_ids: embed(token_ids) * torch.nan
    engine.add(request("bad", tokens=[5] * 25))
    assert engine.step()[0].finish_reason == "error"
    decoder.embed = embed
    for _ in range(idle_steps):
        assert engine.step() == []
    engine.add(request("good", tokens=[5] * 3))
    assert finish(engine) == {"good": "length"}
    engine.add(request("same", tokens=[5] * 25))
    assert finish(engine) == {"same": "length"}, "nothing of the failed one may be found in the prefix cache"


def test_stats_count_tokens_steps_and_blocks(engine):
    engine.add(request(tokens=[5] * 20, max_tokens=3))
    engine.step()
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.kv_blocks_used, stats.num_running) == (20, 1, 2, 1)
    finish(engine)
    assert (engine.stats().generation_tokens, engine.stats().steps) == (3, 3)


def test_settings_that_cannot_work_say_what_to_do(folder):
    with pytest.raises(ConfigurationError, match="--kv-cache-memory"):
        Engine(EngineConfig(model=str(folder), **{**SETTINGS, "kv_cache_memory": "10B"}), folder)
    with pytest.raises(ConfigurationError, match="--max-model-len"):
        Engine(EngineConfig(model=str(folder), **SETTINGS, max_model_len=10**9), folder)


def test_kv_memory_is_measured_by_default(folder):
    engine = Engine(EngineConfig(model=str(folder), device="cpu", max_num_seqs=2, max_model_len=64), folder)
    assert engine.stats().kv_blocks_total == 2 * 4, "no more blocks than the running requests can fill"


def test_an_engine_on_a_cpu_has_no_gpu(engine):
    assert engine.info.gpu_uuid is None


def test_timings_cover_the_parts_of_a_step(engine):
    engine.add(request())
    engine.step()
    assert engine.timings.run.model > 0
    assert engine.timings.overhead > 0


def test_requests_have_their_own_timings(engine):
    engine.add(request("early", max_tokens=3))
    engine.add(request("goes on", max_tokens=9))
    engine.step(), engine.step()
    engine.add(request("late", max_tokens=1))
    timings = {output.request_id: output.timings for output in engine.step()}
    assert timings["early"].decode > 0
    assert timings["goes on"] is None
    assert timings["late"].decode == 0
