"""The tokenizer and the chat template in a GGUF file."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.families.registry import gguf_family
from vlmserve.gguf.config import CONTROL, end_token_ids, sampling_settings
from vlmserve.gguf_header import Header, read_header
from vlmserve.prompt.files import EXTRA_TEMPLATES, PromptFiles

logger = logging.getLogger(__name__)

NORMAL, UNKNOWN, USER_DEFINED, UNUSED = 1, 2, 4, 5
"""Token types besides `CONTROL`."""

SPACE = "▁"
"""SentencePiece's character for a space."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """How a byte-level tokenizer splits text before it merges."""

    split: str | None = None
    """Pattern of pieces; None: GPT-2's pattern."""
    digits: bool = False
    """Each digit is a piece."""
    nfc: bool = False
    """Normalize to NFC first."""
    whole: bool = False
    """Use a piece that is a token without merging."""
    begins: bool = False
    """Add BOS unless the file says otherwise."""


_GPT2 = PreTokenizer()
_STARCODER = PreTokenizer(digits=True)
_LLAMA3_WHOLE = PreTokenizer(_LLAMA3, whole=True, begins=True)

PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), _STARCODER),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3_WHOLE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), PreTokenizer(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), PreTokenizer(_QWEN2, nfc=True)),
    **dict.fromkeys(("stablelm2", "megrez"), PreTokenizer(_QWEN2)),
    "tekken": PreTokenizer(_TEKKEN, whole=True, begins=True),
    "gpt-4o": PreTokenizer(_GPT4O),
}
"""By ``tokenizer.ggml.pre``."""


class _Token(NamedTuple):
    text: str
    kind: int
    score: float


def read_prompt_files(path: Path) -> PromptFiles:
    """Read a file's prompt settings. Raises as `read_header` does."""
    header = read_header(path)
    ids = {f"{name}_token": _special_id(header, key) for name, key in _SPECIAL.items()}
    tokens = header.texts("tokenizer.ggml.tokens", {id_ for id_ in ids.values() if id_ is not None})
    names = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")
    template, tool_template = (source if isinstance(source := header.values.get(name), str) else None for name in names)
    return PromptFiles(
        tokenizer_config={},
        special_tokens={name: tokens[id_] for name, id_ in ids.items() if id_ in tokens},
        image_token_id=None,
        chat_template=template,
        tool_template=tool_template,
        end_token_ids=end_token_ids(header),
    )


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Raises ModelLoadError for a missing or broken tokenizer, UnsupportedModelError for an unknown kind or
    pre-tokenizer.
    """
    header = read_header(path)
    texts = header.array("tokenizer.ggml.tokens")
    model = header.values.get("tokenizer.ggml.model")
    needed = {"llama": ("scores", "token_type"), "gpt2": ("merges", "token_type")}.get(str(model), ())
    for name in ("tokens", *needed):
        if f"tokenizer.ggml.{name}" not in header.arrays:
            raise ModelLoadError(f"{path}: its tokenizer lacks {name} (tokenizer.ggml.{name})")
    kinds = header.array("tokenizer.ggml.token_type") or [NORMAL] * len(texts)
    scores = header.array("tokenizer.ggml.scores") or [0.0] * len(texts)
    if not texts or len(kinds) != len(texts) or len(scores) != len(texts):
        raise ModelLoadError(f"{path}: its tokenizer is incomplete")
    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is not None and len(texts) < embeddings.shape[0]:
        raise ModelLoadError(f"{path}: its tokenizer has {len(texts)} tokens, but the model {embeddings.shape[0]}")
    tokens = [_Token(*token) for token in zip(texts, kinds, scores, strict=True)]
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(f"{path}: tokenizer {model!r} is not supported; supported are 'gpt2' and 'llama'")
    try:
        tokenizer = _byte_level(header, tokens) if model == "gpt2" else _sentence_piece(header, tokens)
    except UnsupportedModelError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise ModelLoadError(f"{path}: its tokenizer cannot be read: {error}") from error
    return tokenizer


def write_prompt_files(path: Path, out: Path) -> None:
    """Write tokenizer, chat templates and generation settings in Hugging Face layout.

    Raises what `read_prompt_files` and `read_tokenizer` raise.
    """
    files = read_prompt_files(path)
    read_tokenizer(path).save(str(out / "tokenizer.json"))
    contents = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **files.special_tokens},
        "generation_config.json": {
            "eos_token_id": sorted(files.end_token_ids), **sampling_settings(read_header(path)),
        },
    }  # fmt: skip
    for name, content in contents.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    if files.chat_template is not None:
        (out / "chat_template.jinja").write_text(files.chat_template, "utf-8")
    if files.tool_template is not None:
        (out / EXTRA_TEMPLATES).mkdir(exist_ok=True)
        (out / EXTRA_TEMPLATES / "tool_use.jinja").write_text(files.tool_template, "utf-8")


_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""SentencePiece's defaults."""


def _special_id(header: Header, name: str) -> int | None:
    default = _DEFAULT_IDS.get(name) if header.values.get("tokenizer.ggml.model") == "llama" else None
    id_ = header.values.get(f"tokenizer.ggml.{name}_token_id", default)
    return None if id_ is None else int(id_)


def _byte_level(header: Header, tokens: Sequence[_Token]) -> tokenizers.Tokenizer:
    name = header.values.get("tokenizer.ggml.pre", "default")
    if name == "default":
        logger.warning("%s names no pre-tokenizer: GPT-2's is used", header.path)
    elif name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{header.path}: pre-tokenizer {name!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    kind = PRE_TOKENIZERS.get(name, _GPT2)
    # the first character may be a space
    cuts = [(merge, merge.find(" ", 1)) for merge in header.array("tokenizer.ggml.merges")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=_vocabulary(header, tokens),
            merges=[(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts],
            ignore_merges=kind.whole,
        )
    )
    steps: list[pre_tokenizers.PreTokenizer] = []
    if kind.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if kind.split is not None:
        steps.append(pre_tokenizers.Split(Regex(kind.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens)
    _frame(tokenizer, header, tokens, begins=kind.begins)
    return tokenizer


def _sentence_piece(header: Header, tokens: Sequence[_Token]) -> tokenizers.Tokenizer:
    unknown = _special_id(header, "unknown")
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=_vocabulary(header, tokens),
            merges=_merges(tokens),
            unk_token=None if unknown is None else tokens[unknown].text,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.values.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    family = gguf_family(header.architecture)
    _add_tokens(tokenizer, tokens, strips=family is not None and family[1].strips_space)
    _frame(tokenizer, header, tokens, begins=True)
    return tokenizer


def _vocabulary(header: Header, tokens: Sequence[_Token]) -> dict[str, int]:
    """Ids by text, without unused tokens that only pad the embedding table."""
    named = {_special_id(header, key) for key in _SPECIAL.values()}
    return {token.text: id_ for id_, token in enumerate(tokens) if token.kind != UNUSED or id_ in named}


def _merges(tokens: Sequence[_Token]) -> list[tuple[str, str]]:
    """SentencePiece's merges: pairs that make the token with the highest score come first."""
    ids = {token.text: id_ for id_, token in enumerate(tokens) if token.kind == NORMAL}
    merges: list[tuple[str, str]] = []
    # Vocabularies have hundreds of thousands of tokens, so look up the first half first.
    for text in sorted(ids, key=lambda text: (-tokens[ids[text]].score, ids[text])):
        pairs = [
            (text[:cut], right) for cut in range(1, len(text)) if text[:cut] in ids and (right := text[cut:]) in ids
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += pairs
    return merges


def _add_tokens(tokenizer: tokenizers.Tokenizer, tokens: Sequence[_Token], *, strips: bool = False) -> None:
    """Add control and user-defined tokens. strips: control tokens swallow spaces after them."""
    usual = {"<unk>", "<s>", "<|endoftext|>"}
    special = [
        AddedToken(token.text, special=True, normalized=False, rstrip=strips and token.text not in usual)
        for token in tokens
        if token.kind in (CONTROL, UNKNOWN)
    ]
    tokenizer.add_special_tokens(special)
    own = [token.text for token in tokens if token.kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in own])


def _frame(tokenizer: tokenizers.Tokenizer, header: Header, tokens: Sequence[_Token], *, begins: bool) -> None:
    """Add BOS and EOS as the file says, or by defaults."""
    adds = {"bos": begins, "eos": False}
    ids = {name: _special_id(header, name) for name in adds}
    for name, default in adds.items():
        adds[name] = ids[name] is not None and bool(header.values.get(f"tokenizer.ggml.add_{name}_token", default))
    frame = {name: (tokens[id_].text, id_) for name, id_ in ids.items() if adds[name] and id_ is not None}
    if frame:
        first, last = ([frame[name][0]] if name in frame else [] for name in ("bos", "eos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], special_tokens=list(frame.values())
        )
