"""Converts tokenizers whose checkpoints implement them in Python, without running that code."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors

from vlmserve.errors import ModelLoadError
from vlmserve.prompt.files import read_json

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GLM_PATTERN = QWEN_PATTERN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))
QWEN_MARKS = ("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>")
"""Qwen-VL's tokens for places in an image, part of questions and answers."""
QWEN_IMAGE = ("<img>", "</img>", "<imgpad>")
CHATGLM_SPECIAL = (
    "[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip


def qwen(folder: Path) -> tokenizers.Tokenizer:
    """Raises ModelLoadError if the file is missing or broken."""
    path = next(iter(sorted(folder.glob("*.tiktoken"))), folder / "qwen.tiktoken")
    tokenizer = _from_ranks(path, QWEN_PATTERN)
    tokenizer.normalizer = normalizers.NFC()
    _add(tokenizer, QWEN_SPECIAL)
    if "visual" in read_json(folder / "config.json"):
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in QWEN_MARKS])
        _add(tokenizer, QWEN_IMAGE)
    return tokenizer


def chatglm(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer of ChatGLM2 and ChatGLM3 (SentencePiece) or GLM-4 (byte-level BPE).

    Raises ModelLoadError for a missing or broken file or library.
    """
    path = folder / "tokenizer.model"
    if _is_ranks(path):
        tokenizer = _from_ranks(path, GLM_PATTERN)
        declared = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
        _add(tokenizer, [declared[key]["content"] for key in sorted(declared, key=int)])
        prefix = ("[gMASK]", "<sop>")
    else:
        tokenizer = _from_sentencepiece(path)
        _add(tokenizer, CHATGLM_SPECIAL)
        prefix = ("[gMASK]", "sop")
    ids = [(token, tokenizer.token_to_id(token)) for token in prefix]
    if any(id_ is None for _, id_ in ids):
        raise ModelLoadError(f"{folder}/tokenizer_config.json does not declare {' and '.join(prefix)}")
    tokenizer.post_processor = processors.TemplateProcessing(single=[*prefix, "$A"], special_tokens=ids)
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read tiktoken's format: a base64 token and its rank per line. Raises ModelLoadError."""
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (OSError, ValueError, binascii.Error) as error:
        raise ModelLoadError(
            f"{path} does not hold tokens and their ranks, as tiktoken writes them: {error}"
        ) from error


def _is_ranks(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            token, rank = file.readline(4096).split()
        return bool(base64.b64decode(token, validate=True)) and rank.isdigit()
    except (OSError, ValueError, binascii.Error):
        return False


def _from_ranks(path: Path, pattern: str) -> tokenizers.Tokenizer:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter = TikTokenConverter(vocab_file=str(path), pattern=pattern)
    # the default needs the tiktoken library
    converter.load_tiktoken_bpe = lambda file: read_ranks(Path(file))
    converted: tokenizers.Tokenizer = converter.converted()
    return converted


def _from_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    from transformers.convert_slow_tokenizer import SentencePieceExtractor

    if not path.is_file():
        raise ModelLoadError(f"{path} and tokenizer.json are missing")
    try:
        extractor = SentencePieceExtractor(str(path))
        parts: dict[str, Any] = extractor.extract(models.BPE)
    except ImportError as error:
        raise ModelLoadError(
            f"{path} is a SentencePiece model: install vlmserve[sentencepiece], or put a tokenizer.json beside it"
        ) from error
    except Exception as error:  # the library's own class for broken files
        raise ModelLoadError(f"{path} is not a SentencePiece model: {error}") from error
    spec = extractor.proto.normalizer_spec
    trainer = extractor.proto.trainer_spec
    if trainer.model_type != 2:
        raise ModelLoadError(f"{path} is not a SentencePiece model of kind BPE")
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=parts["vocab"],
            merges=parts["merges"],
            unk_token=trainer.unk_piece,
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    )
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    stripped = [decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    _add(tokenizer, [piece.piece for piece in extractor.proto.pieces if piece.type == 3])
    return tokenizer


def _add(tokenizer: tokenizers.Tokenizer, tokens: Any) -> None:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
