"""Tokenizers out of GGUF files against the same ones as checkpoints have them, and as SentencePiece defines them."""

from __future__ import annotations

import itertools
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer
from transformers.models.llama.tokenization_llama import LlamaTokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from tests.gguf_files import CONTROL, NORMAL, USER_DEFINED
from tests.prompt.tokenizers_for_tests import CORPUS, byte_level, sentencepiece
from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.frontend.defaults import default_sampling
from vlmserve.prompt.checkpoint import read_prompt_files
from vlmserve.prompt.gguf import read_tokenizer
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.types import SamplingParams

BYTE = 6
TEXTS = [
    *CORPUS[:3],
    "It's 12345 o'clock, WE'LL see: don't!\n\n  two  spaces,\ttabs\r\nand lines \n",
    "cafe\u0301 caf\u00e9 日本語 😀 x=3.14**2; def f(a, b): return a[b]  # 7",
    "CamelCase HTTPServer naïveTé 'S 1 22 333 4444 ½ ²",
    " leading and trailing ",
    "",
]


def write(path: Path, architecture: str = "llama", **fields: Any) -> Path:
    """A file without tensors; fields: of ``tokenizer.ggml``."""
    writer = GGUFWriter(path, architecture)
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_of(tokenizer: tokenizers.Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    state = json.loads(tokenizer.to_str())["model"]
    return state["vocab"], [tuple(merge) for merge in state["merges"]]


def fields_of(tokenizer: tokenizers.Tokenizer, **fields: Any) -> dict[str, Any]:
    """A byte-level tokenizer as a file has it."""
    vocab, merges = model_of(tokenizer)
    tokens = sorted(vocab, key=vocab.get)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [CONTROL if token in added else NORMAL for token in tokens],
        "merges": [" ".join(merge) for merge in merges],
        **fields,
    }


def read(path: Path) -> Tokenizer:
    return Tokenizer.from_folder(path)


def assert_alike(actual: Tokenizer, expected: Any, texts: list[str] = TEXTS) -> None:
    for text in texts:
        ids = actual.encode(text, add_special_tokens=False)
        theirs = expected.encode(text, add_special_tokens=False)
        assert ids == (theirs.ids if hasattr(theirs, "ids") else theirs), text
        assert actual.decode(ids) == expected.decode(ids), text


@pytest.mark.parametrize(("pre", "tokenizer_class"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_byte_level_tokens_are_those_of_transformers(tmp_path: Path, pre: str, tokenizer_class: Any) -> None:
    trained = byte_level(600)
    vocab, merges = model_of(trained)
    path = write(tmp_path / "model.gguf", **fields_of(trained, pre=pre))
    assert_alike(read(path), tokenizer_class(vocab=vocab, merges=merges))


def published(split: str, *, whole: bool = False) -> tokenizers.Tokenizer:
    """A tokenizer that splits text by the pattern that published tokenizer.json files have."""
    trained = byte_level(600)
    vocab, merges = model_of(trained)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = trained.decoder
    return tokenizer


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("dbrx", False)])
def test_digits_split_in_threes_for_such_models(tmp_path: Path, pre: str, whole: bool) -> None:
    path = write(tmp_path / "model.gguf", **fields_of(byte_level(600), pre=pre))
    assert_alike(read(path), published(LLAMA_3, whole=whole))


def test_token_piece_needs_no_merges(tmp_path: Path) -> None:
    """Llama 3 has tokens that its merges do not lead to."""
    fields = fields_of(byte_level(600))
    token = len(fields["tokens"])
    fields["tokens"] += ["zqzq"]
    fields["token_type"] += [NORMAL]
    for pre, whole in (("llama-bpe", True), ("gpt-2", False)):
        tokenizer = read(write(tmp_path / f"{pre}.gguf", **{**fields, "pre": pre}))
        assert (tokenizer.encode("zqzq", add_special_tokens=False) == [token]) is whole


def test_digits_are_single_for_such_models(tmp_path: Path) -> None:
    trained = byte_level(600)
    path = write(tmp_path / "model.gguf", **fields_of(trained, pre="smollm"))
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert_alike(read(path), trained)


def pieces(pre: str, text: str, path: Path) -> list[str]:
    steps = read_tokenizer(write(path, **fields_of(byte_level(300), pre=pre))).pre_tokenizer
    return [text[start:end] for _, (start, end) in steps.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["It", "'s", " HTTPServer", " 12345", "\n"]),
        ("smollm", ["It", "'s", " HTTPServer", " ", "1", "2", "3", "4", "5", "\n"]),
        ("qwen2", ["It", "'s", " HTTPServer", " ", "1", "2", "3", "4", "5", "\n"]),
        ("llama-bpe", ["It", "'s", " HTTPServer", " ", "123", "45", "\n"]),
        ("tekken", ["It", "'s", " HTTPServer", " ", "1", "2", "3", "4", "5", "\n"]),
        ("gpt-4o", ["It's", " HTTPServer", " ", "123", "45", "\n"]),
    ],
)
def test_text_is_split_the_way_the_file_names(tmp_path: Path, pre: str, expected: list[str]) -> None:
    assert pieces(pre, "It's HTTPServer 12345\n", tmp_path / "model.gguf") == expected


def test_capitals_start_pieces_for_such_models(tmp_path: Path) -> None:
    text = "camelCase"
    assert pieces("tekken", text, tmp_path / "tekken.gguf") == ["camel", "Case"]
    assert pieces("llama-bpe", text, tmp_path / "llama.gguf") == ["camelCase"]


def test_unknown_pretokenizer_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", **fields_of(byte_level(), pre="kimi-k2"))
    with pytest.raises(UnsupportedModelError, match=r"pre-tokenizer 'kimi-k2' is not supported; supported are gpt-2"):
        read(path)


def test_file_without_a_pretokenizer_gets_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = fields_of(byte_level(600))
    del fields["pre"]
    with caplog.at_level(logging.WARNING):
        tokenizer = read(write(tmp_path / "model.gguf", **fields))
    assert "names no pre-tokenizer" in caplog.text
    assert_alike(tokenizer, byte_level(600))


# SentencePiece


def sentence_fields(**fields: Any) -> dict[str, Any]:
    """The vocabulary of a SentencePiece model as a file has it: what was merged earlier has a higher score."""
    vocab, _ = model_of(sentencepiece())
    tokens = sorted(vocab, key=vocab.get)
    kinds = []
    for token in tokens:
        is_byte = len(token) == 6 and token.startswith("<0x")
        kinds.append(BYTE if is_byte else CONTROL if token.startswith("<") and token.endswith(">") else NORMAL)
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": [float(-id_) if kind == NORMAL else 0.0 for id_, kind in enumerate(kinds)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **fields,
    }


def sentence_pieces(text: str, fields: dict[str, Any], *, prefix: bool = True) -> list[int]:
    """SentencePiece's own way (https://arxiv.org/abs/1508.07909, with scores for ranks): neighbours become one, those
    first that make the token of the highest score; what is no token becomes bytes."""
    scores = {
        token: score
        for token, score, kind in zip(fields["tokens"], fields["scores"], fields["token_type"], strict=True)
        if kind == NORMAL
    }
    symbols = list(("▁" if prefix and text else "") + text.replace(" ", "▁"))
    while True:
        joined = [left + right for left, right in itertools.pairwise(symbols)]
        best = max((scores[token] for token in joined if token in scores), default=None)
        if best is None:
            break
        place = next(place for place, token in enumerate(joined) if scores.get(token) == best)
        symbols[place : place + 2] = [joined[place]]
    ids = {token: id_ for id_, token in enumerate(fields["tokens"])}
    return [
        id_
        for symbol in symbols
        for id_ in ([ids[symbol]] if symbol in scores else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()])
    ]


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_merge_in_score_order(tmp_path: Path, prefix: bool) -> None:
    fields = sentence_fields(add_space_prefix=prefix)
    # An order that is not that of the ids.
    ranks = list(range(len(fields["tokens"])))
    random.Random(0).shuffle(ranks)
    fields["scores"] = [float(-rank) for rank in ranks]
    tokenizer = read(write(tmp_path / "model.gguf", **fields))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == sentence_pieces(text, fields, prefix=prefix), text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(("prefix", "tokenizer_class"), [(True, LlamaTokenizer), (False, GemmaTokenizer)])
def test_sentence_pieces_are_those_of_transformers(tmp_path: Path, prefix: bool, tokenizer_class: Any) -> None:
    fields = sentence_fields(add_space_prefix=prefix)
    path = write(tmp_path / "model.gguf", **fields)
    actual, merges = read(path), model_of(read_tokenizer(path))[1]
    vocab = {token: id_ for id_, token in enumerate(fields["tokens"])}
    expected = tokenizer_class(vocab=vocab, merges=merges)
    # Whether a space is put before one, Llama's tokenizers disagree.
    assert_alike(actual, expected, [text for text in TEXTS if not text.startswith(" ")])


def test_spaces_are_those_of_llama_2(tmp_path: Path) -> None:
    fields = sentence_fields()
    path = write(tmp_path / "model.gguf", **fields)
    actual, merges = read(path), model_of(read_tokenizer(path))[1]
    vocab = {token: id_ for id_, token in enumerate(fields["tokens"])}
    llama_2 = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    llama_2.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    llama_2.add_special_tokens([AddedToken("<s>", normalized=False)])
    for text in ["  two before", "after<s>a token", "<s> after a token"]:
        assert actual.encode(text, add_special_tokens=False) == llama_2.encode(text, add_special_tokens=False).ids


def test_phi_3_markers_swallow_the_line_break(tmp_path: Path) -> None:
    fields = sentence_fields()
    for name, plain in (("phi3", False), ("llama", True)):
        tokenizer = read(write(tmp_path / f"{name}.gguf", name, **fields))
        marked, unmarked = (
            tokenizer.encode(text, add_special_tokens=False) for text in ("<|im_end|>\nHow", "<|im_end|>How")
        )
        assert (marked != unmarked) is plain


# Special tokens


def test_text_begins_and_ends_as_the_file_says(tmp_path: Path) -> None:
    usual = {
        "gpt-2": (fields_of(byte_level(), bos_token_id=1, eos_token_id=2), False),
        "llama-bpe": (fields_of(byte_level(), bos_token_id=1, eos_token_id=2, pre="llama-bpe"), True),
        "llama": (sentence_fields(), True),
    }
    for name, (fields, begins) in usual.items():
        for said in ({}, {"add_bos_token": False}, {"add_bos_token": True}, {"add_eos_token": True}):
            tokenizer = read(write(tmp_path / "model.gguf", **fields, **said))
            ids = tokenizer.encode("hello")
            assert (ids[0] == 1) is said.get("add_bos_token", begins), (name, said)
            assert (ids[-1] == 2) is said.get("add_eos_token", False), (name, said)
            assert tokenizer.special_tokens["bos_token"] == "<s>"
            assert tokenizer.special_tokens["eos_token"] == "</s>"


def test_user_tokens_are_found_first_and_shown(tmp_path: Path) -> None:
    fields = fields_of(byte_level(600))
    token = len(fields["tokens"])
    fields["tokens"] += ["<think>"]
    fields["token_type"] += [USER_DEFINED]
    tokenizer = read(write(tmp_path / "model.gguf", **fields))
    ids = tokenizer.encode("so<think> it", add_special_tokens=False)
    assert token in ids
    assert tokenizer.decode(ids) == "so<think> it"
    assert token not in tokenizer.special_ids
    assert "<|im_end|>" not in tokenizer.decode(tokenizer.encode("a<|im_end|>b"))


def test_answers_end_at_file_or_token_text_markers(tmp_path: Path) -> None:
    fields = fields_of(byte_level(), eos_token_id=2, eot_token_id=3)
    ends = fields["tokens"].index("<|im_end|>")
    path = write(tmp_path / "model.gguf", **fields)
    assert read(path).end_token_ids == {2, 3, ends}
    fields["token_type"][ends] = NORMAL
    assert read(write(path, **fields)).end_token_ids == {2, 3}


def test_what_a_file_says_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_chat_template("{{ messages[0].content }}")
    writer.add_float32("general.sampling.temp", 0.25)
    writer.add_uint32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.penalty_repeat", 1.25)
    writer.add_int32("general.sampling.penalty_last_n", 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = read_prompt_files(path)
    assert files.chat_template == "{{ messages[0].content }}"
    assert files.image_token_id is None
    expected = SamplingParams(temperature=0.25, top_k=20, repetition_penalty=1.25, repeat_last_n=64)
    assert default_sampling(path) == expected
    with pytest.raises(ModelLoadError, match="its tokenizer lacks tokens"):
        read(path)


def test_another_kind_of_tokenizer_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", **sentence_fields(model="bert"))
    with pytest.raises(UnsupportedModelError, match="tokenizer 'bert' is not supported"):
        read(path)


def test_a_broken_tokenizer_is_no_crash(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", **fields_of(byte_level(), merges=["nobody knows"]))
    with pytest.raises(ModelLoadError, match="its tokenizer cannot be read"):
        read(path)
