from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tests.prompt.tokenizers_for_tests import SPECIAL, byte_level, sentencepiece, word_level
from vlmserve.prompt.detokenize import Detokenizer, token_bytes
from vlmserve.prompt.files import PromptFiles
from vlmserve.prompt.tokenizer import Tokenizer

NO_FILES = PromptFiles(tokenizer_config={}, special_tokens={}, image_token_id=None, chat_template=None)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def word_pieces() -> Backend:
    words = ["[UNK]", "pic", "##ture", "##s", "blue", "red", "##dish", ".", "'", "a"]
    tokenizer = Backend(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


KINDS: dict[str, Callable[[], Backend]] = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece, never a space": lambda: sentencepiece("never"),
    "word pieces": word_pieces,
    "words": word_level,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(KINDS[request.param](), NO_FILES)


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """Byte-level, so stop strings lie across tokens in many ways."""
    return Tokenizer(byte_level(), NO_FILES)


def chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    parts, done = [], 0
    for size in [*sizes, len(ids)]:
        parts.append(ids[done : done + size])
        done += size
    return parts


@settings(max_examples=150, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 3), max_size=30))
def test_deltas_join_to_the_decoded_whole(tokenizer: Tokenizer, data: st.DataObject, sizes: list[int]) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    whole = tokenizer.decode(ids)
    one_by_one = Detokenizer(tokenizer)
    deltas = [one_by_one.push([id_]) for id_ in ids] + [one_by_one.finish()]
    chunked = Detokenizer(tokenizer)
    assert "".join(chunked.push(chunk) for chunk in chunks(ids, sizes)) + chunked.finish() == "".join(deltas)
    assert one_by_one.text == chunked.text == "".join(deltas)
    if REPLACEMENT not in whole:
        assert "".join(deltas) == whole


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20).filter(lambda text: not any(token in text for token in SPECIAL)))
def test_every_text_comes_back_in_whole_characters(letters: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(letters)
    deltas = [detokenizer.push([id_]) for id_ in letters.encode(text, add_special_tokens=False)]
    assert "".join(deltas) + detokenizer.finish() == text
    assert REPLACEMENT in text or not any(REPLACEMENT in delta for delta in deltas)


def test_multi_token_character_arrives_with_its_last_token(letters: Tokenizer) -> None:
    ids = letters.encode("🐈", add_special_tokens=False)
    assert len(ids) > 1
    detokenizer = Detokenizer(letters)
    assert [detokenizer.push([id_]) for id_ in ids] == [""] * (len(ids) - 1) + ["🐈"]


def test_half_a_character_at_the_end_is_dropped(letters: Tokenizer) -> None:
    detokenizer = Detokenizer(letters)
    assert detokenizer.push(letters.encode("a 🐈", add_special_tokens=False)[:-1]) == "a "
    assert detokenizer.finish() == ""


def test_invalid_bytes_do_not_hold_text_back() -> None:
    tokenizer = Tokenizer(sentencepiece(), NO_FILES)
    ids = [tokenizer.token_id(token) for token in ("<0xFF>", "<0xE6>", "a", "<0x97>")]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([id_]) for id_ in ids if id_ is not None] == [
        REPLACEMENT,
        "",
        REPLACEMENT + "a",
        REPLACEMENT,
    ]


def test_special_tokens_are_not_shown(letters: Tokenizer) -> None:
    ids = [1, *letters.encode("hi", add_special_tokens=False), 2]
    assert Detokenizer(letters).push(ids) == "hi"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abAB é", max_size=30),
    stops=st.lists(st.text("abAB é", min_size=1, max_size=5), min_size=1, max_size=3),
    sizes=st.lists(st.integers(0, 3), max_size=20),
)
def test_the_first_completed_stop_string_ends_the_text(
    letters: Tokenizer, text: str, stops: list[str], sizes: list[int]
) -> None:
    ends = [end for end in range(1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    expected = text
    if ends:
        longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        expected = text[: ends[0] - len(longest)]
    detokenizer = Detokenizer(letters, tuple(stops))
    shown = ""
    for chunk in chunks(letters.encode(text, add_special_tokens=False), sizes):
        shown += detokenizer.push(chunk)
        assert expected.startswith(shown)
    assert shown + detokenizer.finish() == expected
    assert detokenizer.stopped == bool(ends)
    assert detokenizer.text == expected


def test_only_possible_stop_strings_are_held_back(letters: Tokenizer) -> None:
    detokenizer = Detokenizer(letters, ("###",))
    ids = {text: letters.encode(text, add_special_tokens=False) for text in ("a#", "#", "b")}
    assert detokenizer.push(ids["a#"]) == "a"
    assert detokenizer.push(ids["#"]) == ""
    assert detokenizer.push(ids["b"]) == "##b"
    assert not detokenizer.stopped


def test_nothing_follows_a_stop_string(letters: Tokenizer) -> None:
    detokenizer = Detokenizer(letters, ("stop",))
    assert detokenizer.push(letters.encode("go stop go", add_special_tokens=False)) == "go "
    assert detokenizer.stopped
    assert detokenizer.push(letters.encode("on", add_special_tokens=False)) == ""
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("text", ["images", "a red image", "reddish images, it's blue."])
def test_the_bytes_of_tokens_together_are_the_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    of = token_bytes(tokenizer)
    assert b"".join(map(of, ids)).decode().strip() == tokenizer.decode(ids, skip_special_tokens=False).strip()
    assert of(10**6) == b""


def test_partial_characters_are_separate_bytes():
    tokenizer = Tokenizer(byte_level(), NO_FILES)
    ids = tokenizer.encode("\N{PARTY POPPER}", add_special_tokens=False)
    parts = [token_bytes(tokenizer)(id_) for id_ in ids]
    assert len(parts) > 1
    assert b"".join(parts) == "\N{PARTY POPPER}".encode()


@given(st.lists(st.integers(0, 300), max_size=30))
def test_decoded_text_is_shown_up_to_held_text(ids):
    detokenizer = Detokenizer(Tokenizer(byte_level(), NO_FILES), stop=["images"])
    shown = ""
    for id_ in ids:
        shown += detokenizer.push([id_])
        assert detokenizer.num_shown == len(shown) <= detokenizer.num_decoded
        assert detokenizer.num_decoded - len(shown) < len("images")
    shown += detokenizer.finish()
    assert detokenizer.num_shown == len(shown) == detokenizer.num_decoded


def test_special_tokens_are_shown_where_asked_for(tokenizer: Tokenizer) -> None:
    if not tokenizer.special_ids:
        pytest.skip("this tokenizer has none")
    special = min(tokenizer.special_ids)
    ids = [*tokenizer.encode("blue", add_special_tokens=False), special, special]
    shown = Detokenizer(tokenizer, shown_ids=tokenizer.special_ids)
    text = "".join(shown.push([id_]) for id_ in ids) + shown.finish()
    assert text.count(tokenizer.token(special) or "?") == 2
    stopped = Detokenizer(tokenizer, [tokenizer.token(special) or "?"], tokenizer.special_ids)
    assert "".join(stopped.push([id_]) for id_ in ids).rstrip() == tokenizer.decode(ids).rstrip()
    assert stopped.stopped


def test_stop_strings_are_kept_where_asked_for(letters: Tokenizer) -> None:
    ids = letters.encode("one two three", add_special_tokens=False)
    kept = Detokenizer(letters, ["two"], keeps_stop=True)
    assert "".join(kept.push([id_]) for id_ in ids) + kept.finish() == "one two"
    assert kept.stop_string == "two"
    end = Detokenizer(letters, ["x"])
    assert end.push(ids[:3]) + end.finish(ids[3]) == letters.decode(ids[:4])
    assert end.num_tokens == 3


def test_stop_strings_have_no_effect_before_min_tokens(letters: Tokenizer) -> None:
    ids = letters.encode("aXaXaX", add_special_tokens=False)
    late = Detokenizer(letters, ["aX"], min_tokens=len(ids) - 1)
    assert "".join(late.push([id_]) for id_ in ids) + late.finish() == "aXaX"
    never = Detokenizer(letters, ["aX"], min_tokens=len(ids))
    assert "".join(never.push([id_]) for id_ in ids) + never.finish() == "aXaXaX"
