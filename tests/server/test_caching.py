"""What a client of the real engine notices of the caches, through the real openai client."""

from __future__ import annotations

import pytest

from tests.server.live import LiveServer
from tests.server.test_chat import about, data_url
from vlmserve.models.hub import resolve_model
from vlmserve.settings.config import BUILT_IN_MODEL


@pytest.fixture(scope="module")
def pixie():
    engine = {"engine": "real", "kv_cache_memory": "16MiB", "num_threads": 1}
    with LiveServer(resolve_model(BUILT_IN_MODEL), engine=engine) as server:
        yield server


def ask(server: LiveServer, color: str, **fields):
    answer = server.openai.chat.completions.create(
        model="tiny", messages=about(data_url(color)), max_tokens=4, temperature=0, **fields
    )
    return answer.choices[0].message.content, answer.usage


def test_usage_reports_cached_tokens_with_and_without_streaming(pixie):
    text, first = ask(pixie, "red")
    assert first.prompt_tokens_details.cached_tokens == 0
    assert first.prompt_tokens_details.images == first.prompt_tokens_details.images_encoded == 1
    again_text, again = ask(pixie, "red")
    assert again_text == text
    assert 0 < again.prompt_tokens_details.cached_tokens < again.prompt_tokens
    assert again.prompt_tokens_details.images_encoded == 0
    *_, last = pixie.openai.chat.completions.create(
        model="tiny",
        messages=about(data_url("red")),
        max_tokens=4,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert last.usage.prompt_tokens_details == again.prompt_tokens_details


def test_another_image_finds_nothing_of_this_one(pixie):
    ask(pixie, "green")
    cached = ask(pixie, "blue")[1].prompt_tokens_details.cached_tokens
    text_before_the_image = 16
    assert cached <= text_before_the_image


def test_nothing_is_shared_across_salts(pixie):
    def cached(color: str, salt: str | None) -> int:
        return ask(pixie, color, extra_body={"cache_salt": salt})[1].prompt_tokens_details.cached_tokens

    assert cached("orange", "a") == 0
    assert cached("orange", "b") == 0
    unsalted = cached("orange", None)
    assert cached("orange", "a") > unsalted
    before = pixie.service.preparer.media.image_cache.stats()
    assert cached("orange", "c") == 0
    after = pixie.service.preparer.media.image_cache.stats()
    assert (after.hits, after.misses) == (before.hits, before.misses + 1)


def test_n_answers_share_cache_hits_and_encode_once(pixie):
    first, again = (ask(pixie, "purple", n=3)[1].prompt_tokens_details for _ in range(2))
    assert first.cached_tokens <= 16 < again.cached_tokens
    assert (first.images_encoded, again.images_encoded) == (1, 0)
