"""Tokenizers whose own code is never run, against what they are made of."""

from __future__ import annotations

import base64
import importlib
import io
import json
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.normalized import normalized
from tests.oracles import rank_bpe
from tests.prompt.tokenizers_for_tests import CORPUS
from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.prompt import convert
from vlmserve.prompt.detokenize import Detokenizer
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.settings.config import MediaConfig

# As the first Qwen and GLM-4 publish them.
QWEN_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"""
    r"""|\s+(?!\S)|\s+"""
)
GLM_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"""
    r"""|\s+(?!\S)|\s+"""
)
TEXTS = st.lists(
    st.sampled_from([*"aet 'x\n.,3", "  ", "the", "image", " red", "café", "cafe\u0301", "日本", "😀", "1234", "'LL"]),
    max_size=12,
).map("".join)
RANKS = rank_bpe.train(CORPUS, QWEN_PATTERN, 60)
END, IM_START, IM_END = (len(RANKS) + index for index in range(3))
REF, IMG, IMG_END, IMGPAD = (len(RANKS) + 208 + index for index in (0, 6, 7, 8))


def write_ranks(path: Path, ranks: Mapping[bytes, int] = RANKS) -> None:
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    path.write_bytes(b"\n".join(lines) + b"\n")


def qwen(folder: Path, *, takes_images: bool, chat: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"model_type": "qwen", "architectures": ["QWenLMHeadModel"], "vocab_size": 600}
    if takes_images:
        config["visual"] = {"image_size": 84, "image_start_id": IMG, "n_queries": 9}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_qwen.X", None]}})
    )
    generation = {"chat_format": "chatml" if chat else "raw", "eos_token_id": END}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    write_ranks(folder / "qwen.tiktoken")
    return folder


@pytest.fixture(scope="module")
def qwen_text(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(qwen(tmp_path_factory.mktemp("qwen"), takes_images=False))


@pytest.fixture(scope="module")
def qwen_vl(tmp_path_factory: pytest.TempPathFactory) -> RequestPreparer:
    return RequestPreparer(qwen(tmp_path_factory.mktemp("qwen_vl"), takes_images=True), MediaConfig())


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(TEXTS, st.text(max_size=20)))
def test_ids_of_qwen_are_those_of_its_ranks(qwen_text: Tokenizer, text: str) -> None:
    normal = unicodedata.normalize("NFC", text)
    ids = qwen_text.encode(text)
    assert ids == rank_bpe.encode(normal, QWEN_PATTERN, RANKS)
    assert qwen_text.decode(ids) == normal


def test_special_tokens_of_qwen_follow_in_their_order(qwen_text: Tokenizer, qwen_vl: RequestPreparer) -> None:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>", "<|extra_204|>"]
    ids = [END, IM_START, IM_END, IM_END + 1, len(RANKS) + 207]
    assert [qwen_text.token_id(name) for name in names] == ids
    assert qwen_text.token_id("<img>") is None
    tokenizer = qwen_vl.tokenizer
    names += ["<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>", "<img>", "</img>", "<imgpad>"]
    assert [tokenizer.token_id(name) for name in names] == ids + list(range(REF, IMGPAD + 1))
    assert (tokenizer.image_token, tokenizer.image_token_id) == ("<imgpad>", IMGPAD)


def test_image_places_are_part_of_an_answer(qwen_vl: RequestPreparer) -> None:
    text = "<ref>red</ref><box>(1,2),(3,4)</box>"
    ids = qwen_vl.tokenizer.encode(text)
    assert ids[0] == REF
    detokenizer = Detokenizer(qwen_vl.tokenizer)
    assert detokenizer.push([*ids, IM_END]) + detokenizer.finish() == text


def image(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (60, 90, 3), np.uint8))


def image_part(seed: int) -> dict[str, Any]:
    file = io.BytesIO()
    image(seed).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def test_conversations_of_qwen_vl_number_their_images(qwen_vl: RequestPreparer) -> None:
    prompt = qwen_vl.chat(
        [
            {"role": "user", "content": [image_part(0), {"type": "text", "text": "the image"}]},
            {"role": "assistant", "content": "a red circle"},
            {"role": "user", "content": [image_part(1), image_part(0), {"type": "text", "text": "and <img>?"}]},
        ]
    )
    encode = lambda text: rank_bpe.encode(text, QWEN_PATTERN, RANKS)  # noqa: E731
    seen = [IMG, *[IMGPAD] * 9, IMG_END]

    def turn(*parts: list[int]) -> list[int]:
        return [IM_START, *(id_ for part in parts for id_ in part), IM_END, *encode("\n")]

    # What users write is text, whatever it looks like.
    expected = [
        *turn(encode("system\nYou are a helpful assistant.")),
        *turn(encode("user\nPicture 1: "), seen, encode("\nthe image")),
        *turn(encode("assistant\na red circle")),
        *turn(encode("user\nPicture 2: "), seen, encode("\nPicture 3: "), seen, encode("\nand <img>?")),
        IM_START,
        *encode("assistant\n"),
    ]
    assert prompt.token_ids == expected
    keys = [span.image.key for span in prompt.images]
    assert keys[0] == keys[2] != keys[1]
    assert [expected[span.start - 1] for span in prompt.images] == [IMG] * 3


def test_system_message_replaces_qwens_own(qwen_vl: RequestPreparer) -> None:
    prompt = qwen_vl.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the"}])
    text = qwen_vl.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n")


def test_qwen_vl_images_are_squeezed_into_a_square(qwen_vl: RequestPreparer) -> None:
    (span,) = qwen_vl.chat([{"role": "user", "content": [image_part(0), {"type": "text", "text": "the"}]}]).images
    levels = np.asarray(image(0).resize((84, 84), Image.Resampling.BICUBIC)).astype(np.float64) / 255
    mean, deviation = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    expected = ((levels - mean) / deviation).transpose(2, 0, 1)[None]
    np.testing.assert_allclose(normalized(span.image), expected, atol=1e-5)
    assert span.image.num_tokens == 9


def test_non_chat_qwen_has_no_template(tmp_path: Path) -> None:
    folder = qwen(tmp_path, takes_images=False, chat=False)
    with pytest.raises(Exception, match="no chat template"):
        RequestPreparer(folder, MediaConfig()).chat([{"role": "user", "content": "the"}])


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sentencepiece")
    (path / "corpus.txt").write_text("\n".join(CORPUS * 5), "utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(path / "corpus.txt"), model_prefix=str(path / "tokenizer"), model_type="bpe", vocab_size=340,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        minloglevel=2, num_threads=1,
    )  # fmt: skip
    return path / "tokenizer.model"


def chatglm(folder: Path, model: Path | None, **tokenizer_config: Any) -> Path:
    config = {"model_type": "chatglm", "_name_or_path": "THUDM/chatglm3-6b"}
    (folder / "config.json").write_text(json.dumps(config))
    code = {"AutoTokenizer": ["tokenization_chatglm.ChatGLMTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": code, **tokenizer_config}))
    if model is not None:
        (folder / "tokenizer.model").write_bytes(model.read_bytes())
    return folder


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(TEXTS, st.text(max_size=20)))
def test_chatglm3_ids_equal_its_sentencepiece_model(
    tmp_path_factory: pytest.TempPathFactory, sentencepiece_model: Path, text: str
) -> None:
    ours, theirs = _chatglm3(tmp_path_factory, sentencepiece_model)
    # The library leaves these out, as characters that no text needs.
    if "\0" in text or "▁" in text:
        return
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids)


_MADE: dict[Path, tuple[Tokenizer, Any]] = {}


def _chatglm3(factory: pytest.TempPathFactory, model: Path) -> tuple[Tokenizer, Any]:
    if model not in _MADE:
        folder = chatglm(factory.mktemp("chatglm"), model)
        _MADE[model] = Tokenizer.from_folder(folder), sentencepiece.SentencePieceProcessor(model_file=str(model))
    return _MADE[model]


def test_prompts_of_chatglm3_begin_with_its_prefix(tmp_path: Path, sentencepiece_model: Path) -> None:
    preparer = RequestPreparer(chatglm(tmp_path, sentencepiece_model), MediaConfig())
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    count = theirs.vocab_size()
    names = ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    assert [preparer.tokenizer.token_id(name) for name in names] == list(range(count, count + 9))
    gmask, sop, system, user, assistant = (count + index for index in (1, 3, 5, 6, 7))
    assert preparer.text("the image").token_ids == [gmask, sop, *theirs.encode("the image")]
    prompt = preparer.chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "the image <|user|>"},
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": "and?"},
        ]
    )
    # Its own code writes a turn as the role's token, a line break, and the text by itself.
    turns = [(system, "Be brief."), (user, "the image <|user|>"), (assistant, "red"), (user, "and?")]
    expected = [gmask, sop]
    for role, text in turns:
        expected += [role, *theirs.encode("\n"), *theirs.encode(text)]
    assert prompt.token_ids == [*expected, assistant]


def test_glm4_ranks_are_found_despite_sentencepiece_name(tmp_path: Path) -> None:
    ranks = rank_bpe.train(["the number 1234512345"], GLM_PATTERN, 8)
    assert b"123" in ranks, "up to three digits are one word"
    names = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"]
    declared = {str(len(ranks) + index): {"content": name, "special": True} for index, name in enumerate(names)}
    folder = chatglm(tmp_path, None, added_tokens_decoder=declared)
    write_ranks(folder / "tokenizer.model", ranks)
    tokenizer = Tokenizer.from_folder(folder)
    assert [tokenizer.token_id(name) for name in names] == [len(ranks) + index for index in range(8)]
    for text in ("the image 123123412", "'LL go", " a  b\n\n"):
        assert tokenizer.encode(text)[2:] == rank_bpe.encode(text, GLM_PATTERN, ranks)
    assert tokenizer.encode("the")[:2] == [len(ranks) + 2, len(ranks) + 4]
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"does not declare \[gMASK\] and <sop>"):
        Tokenizer.from_folder(folder)


def test_broken_files_are_errors_that_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = qwen(tmp_path / "qwen", takes_images=False)
    (folder / "qwen.tiktoken").write_text("not base64 at all")
    with pytest.raises(ModelLoadError, match="as tiktoken writes them"):
        Tokenizer.from_folder(folder)
    (folder / "qwen.tiktoken").unlink()
    with pytest.raises(ModelLoadError, match=r"qwen\.tiktoken"):
        Tokenizer.from_folder(folder)
    (tmp_path / "glm").mkdir()
    folder = chatglm(tmp_path / "glm", None)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model and tokenizer\.json are missing"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.model").write_bytes(b"\xff\xfe\x00 nonsense")
    with pytest.raises(ModelLoadError, match="not a SentencePiece model"):
        Tokenizer.from_folder(folder)


def test_without_the_library_an_error_names_the_extra(
    tmp_path: Path, sentencepiece_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise ImportError("no sentencepiece")

    convert_slow_tokenizer = importlib.import_module("transformers.convert_slow_tokenizer")
    monkeypatch.setattr(convert_slow_tokenizer, "requires_backends", fail)
    with pytest.raises(ModelLoadError, match=r"install vlmserve\[sentencepiece\]"):
        convert.chatglm(chatglm(tmp_path, sentencepiece_model))


def test_a_tokenizer_that_is_code_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('it ran')")
    code = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": code}))
    with pytest.raises(UnsupportedModelError, match=r"is Python code, which is never run; convert it"):
        Tokenizer.from_folder(tmp_path)
