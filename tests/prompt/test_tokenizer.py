from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tests.prompt.tokenizers_for_tests import SPECIAL, byte_level, sentencepiece, word_level, write_checkpoint
from vlmserve import cancellation
from vlmserve.cancellation import run_in_thread
from vlmserve.errors import CancelledWorkError, ModelLoadError, PromptTooLongError, UnsupportedModelError
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.prompt.untrusted import ControlTokens, Quotation

KINDS: dict[str, Callable[[], Backend]] = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece, always a space": lambda: sentencepiece("always"),
    "sentencepiece, never a space": lambda: sentencepiece("never"),
    "sentencepiece, first format": lambda: sentencepiece(legacy=True),
}
PIECES = st.sampled_from([*SPECIAL, *"<>|s ab\n", "im", "age", "image", " 日本", "é", "😀", "  "])
TEXTS = st.lists(PIECES, max_size=8).map("".join)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, object]:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), KINDS[request.param]())
    return Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)


@settings(max_examples=40, deadline=None)
@given(text=st.one_of(TEXTS, st.text(max_size=20)))
def test_ids_and_text_are_those_of_transformers(pair, text: str) -> None:
    ours, theirs = pair
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    if not text.startswith("<s>"):
        assert ours.encode(text) == theirs.encode(text)


def test_a_beginning_token_is_not_doubled(pair) -> None:
    ours, _ = pair
    bos = ours.token_id("<s>")
    assert ours.encode("<s>hello").count(bos) == 1
    assert ours.encode("hello").count(bos) == 1


@settings(max_examples=60, deadline=None)
@given(before=TEXTS, after=TEXTS)
def test_quoting_leaves_other_ids_unchanged(pair, before: str, after: str) -> None:
    # "zz" is quoted though it is no control token, so all else must come out as if nothing was quoted.
    ours, _ = pair
    quotation = Quotation(ControlTokens(["zz"]))
    code = quotation.quote("zz")
    assert ours.encode_quoted(before + code + after, quotation) == ours.encode(
        before + "zz" + after, add_special_tokens=False
    )


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_users_cannot_write_control_tokens(pair, texts: list[str]) -> None:
    ours, _ = pair
    quotation = Quotation(ours.control_tokens)
    rendered = "<|im_start|>" + "".join(quotation.quote(text) for text in texts) + "<|im_end|>"
    ids = ours.encode_quoted(rendered, quotation)
    special = [ours.token(id_) for id_ in ids if id_ in ours.special_ids and ours.token(id_) != "<unk>"]
    assert special == ["<|im_start|>", "<|im_end|>"]
    assert ours.decode(ids).replace(" ", "") == "".join(texts).replace(" ", "")


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_users_cannot_write_word_like_control_tokens(texts: list[str]) -> None:
    ours = _word_level_tokenizer()
    quotation = Quotation(ours.control_tokens)
    rendered = "<image> " + " ".join(quotation.quote(text) for text in texts) + " </s>"
    ids = ours.encode_quoted(rendered, quotation)
    assert [ours.token(id_) for id_ in ids if id_ in ours.special_ids and id_ != 0] == ["<image>", "</s>"]


def _word_level_tokenizer() -> Tokenizer:
    from vlmserve.prompt.files import PromptFiles

    files = PromptFiles(
        tokenizer_config={},
        special_tokens={"unk_token": "<unk>"},
        image_token_id=SPECIAL.index("<image>"),
        chat_template=None,
    )
    return Tokenizer(word_level(), files)


def test_harmless_added_tokens_survive_beside_quoted_text(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<think>", special=False)])
    ours = Tokenizer.from_folder(write_checkpoint(tmp_path, backend))
    quotation = Quotation(ours.control_tokens)
    quoted = quotation.quote("<think> </s>")
    assert ours.token_id("<think>") in ours.encode_quoted(quoted, quotation)
    assert ours.token_id("</s>") not in ours.encode_quoted(quoted, quotation)


def test_placeholders_swallow_spaces_beside_quoted_text(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<pad>", lstrip=True, rstrip=True, special=True, normalized=False)])
    ours = Tokenizer.from_folder(write_checkpoint(tmp_path, backend))
    quotation = Quotation(ours.control_tokens)
    rendered = quotation.quote("<image>") + "a <pad> b"
    plain = quotation.quote("<image>") + "a"
    expected = [
        *ours.encode_quoted(plain, quotation),
        ours.token_id("<pad>"),
        *ours.encode("b", add_special_tokens=False),
    ]
    assert ours.encode_quoted(rendered, quotation) == expected


@pytest.mark.parametrize("flags", [{"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_tokenizer_json_decides_begin_and_end_tokens(tmp_path: Path, flags: dict[str, bool]) -> None:
    folder = write_checkpoint(tmp_path, byte_level(), tokenizer_config=flags)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    assert Tokenizer.from_folder(folder).encode("an image") == theirs.encode("an image")


def test_added_tokens_of_tokenizer_config_are_added(tmp_path: Path) -> None:
    backend = byte_level()
    size = backend.get_vocab_size()
    entry = {"content": "<extra>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    folder = write_checkpoint(tmp_path, backend, tokenizer_config={"added_tokens_decoder": {str(size): entry}})
    assert Tokenizer.from_folder(folder).encode("<extra>", add_special_tokens=False) == [size]


def test_end_tokens_follow_generation_config_then_config(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, byte_level())
    assert Tokenizer.from_folder(folder).end_token_ids == {2}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert Tokenizer.from_folder(folder).end_token_ids == {2, 5}
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert Tokenizer.from_folder(folder).end_token_ids == {2}


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, byte_level())
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        Tokenizer.from_folder(folder)


def test_a_broken_tokenizer_file_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, byte_level())
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder)


def test_a_placeholder_that_the_tokenizer_lacks_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, byte_level(), config={"image_token_index": 32000})
    with pytest.raises(UnsupportedModelError, match="32000"):
        Tokenizer.from_folder(folder)


def test_a_tokenizer_of_sentencepiece_alone_is_converted(tmp_path: Path) -> None:
    spm = pytest.importorskip("sentencepiece")
    from tests.prompt.tokenizers_for_tests import CORPUS

    folder = write_checkpoint(
        tmp_path, byte_level(), takes_images=False, tokenizer_config={"tokenizer_class": "LlamaTokenizer"}
    )
    (folder / "tokenizer.json").unlink()
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(CORPUS))
    spm.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    ours = Tokenizer.from_folder(folder)
    theirs = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    text = "What is in the image? 日本 two blue squares"
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == text


def test_plausible_text_fits_and_huge_text_is_rejected(pair) -> None:
    ours, _ = pair
    for text in ("hello world " * 5000, " " * 100_000, "日本" * 20_000, "a\n" * 30_000):
        count = len(ours.encode(text))
        if len(text) <= 128 * count:
            ours.check_length([text], count)
            ours.check_length([text[:1000], text[1000:]], count)
        with pytest.raises(PromptTooLongError, match="has more than"):
            ours.check_length([text], min(count // 10, len(text) // 20))


def test_a_cancelled_request_is_not_tokenized_any_further(pair) -> None:
    ours, _ = pair
    pieces = 0

    class Cancelled(str):
        def __getitem__(self, key):
            nonlocal pieces
            pieces += 1
            if pieces == 3:
                event.set()
            return str(self)[key]

    async def leave() -> None:
        with ThreadPoolExecutor(1) as pool:
            await run_in_thread(pool, work)

    event = threading.Event()

    def work() -> None:
        cancellation.current.set(event)
        ours.check_length([Cancelled("a b " * 100_000)], 20_000)

    with pytest.raises(CancelledWorkError):
        asyncio.run(leave())
    assert pieces == 3
