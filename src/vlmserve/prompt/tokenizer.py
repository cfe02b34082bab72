"""Tokenizes and decodes text with a checkpoint's files. Thread-safe; imports neither torch nor transformers."""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from blake3 import blake3
from tokenizers import AddedToken

from vlmserve.cancellation import check_cancelled
from vlmserve.errors import InvalidRequestError, ModelLoadError, PromptTooLongError, UnsupportedModelError
from vlmserve.gguf.pair import language_model
from vlmserve.prompt.checkpoint import read_prompt_files
from vlmserve.prompt.completeness import check_added, check_complete
from vlmserve.prompt.files import PromptFiles
from vlmserve.prompt.gguf import read_tokenizer
from vlmserve.prompt.text_time import SHORT_TEXT, check_time, is_quadratic
from vlmserve.prompt.tokenizer_limits import check_count, check_sizes, check_tokenizer
from vlmserve.prompt.untrusted import ControlTokens, Quotation, find_all

TOOL_MARKS = frozenset({"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"})
"""Tokens around tool calls and results in chat templates. Users' text may not contain them."""

_USUAL_CHARACTERS = 8
"""Characters per token of the context: `check_length` passes shorter texts."""
_MOST_CHARACTERS = 128
"""Assumed minimum for the longest token, in characters. Few vocabularies have longer tokens, and some tokenizers drop
whitespace or merge unknown characters into one token."""
_EXCESS = 4
"""Maximum tokens of a text, relative to the context. Chat templates may drop some text."""
_PIECE = 16384
"""Characters to count at a time."""


class Tokenizer:
    """Reads ``tokenizer.json``; without it, `prompt.convert` or transformers converts the tokenizer.

    image_mark: what chat templates write for an image. frame_ends: tokens around each video frame with a timestamp.
    frames_are_images: as in `PromptFiles`. special_tokens: by name (``bos_token``…). end_token_ids: end an answer.
    control_tokens: users' text is never read as these.
    """

    def __init__(self, backend: tokenizers.Tokenizer, files: PromptFiles) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        _complete(backend, files)
        self._backend = backend
        self.special_tokens = dict(files.special_tokens)
        self.image_token_id, self.video_token_id = files.image_token_id, files.video_token_id
        self.image_token = _ensure_token(backend, files.image_token_id, "the placeholder of images")
        self.video_token = _ensure_token(backend, files.video_token_id, "the placeholder of videos")
        self.image_mark, self._image = self.image_token, None
        if files.image_ends is not None:
            begin, end = (_ensure_token(backend, id_, "a token around images") for id_ in files.image_ends)
            self.image_mark, self._image = begin, f"\n\n{begin}{self.image_token}{end}\n\n"
        self.frame_ends: tuple[str, str] | None = None
        self.frames_are_images = files.frames_are_images
        if files.frame_ends is not None:
            begin, end = (_ensure_token(backend, id_, "a token around frames") for id_ in files.frame_ends)
            assert begin is not None
            assert end is not None
            self.frame_ends = begin, end
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        beside = (*(files.image_ends or ()), *(files.frame_ends or ()))
        media_ids = (files.image_token_id, files.video_token_id, *beside)
        # Some vocabularies have them as ordinary tokens, so that answers show them.
        marks = {id_ for id_, token in added.items() if token.content in TOOL_MARKS}
        self._control_ids = self.special_ids | marks | {id_ for id_ in media_ids if id_ is not None}
        self._added = {token.content: (id_, token) for id_, token in added.items()}
        # A tokenizer may write its unknown token for ordinary text; it is harmless.
        self._forbidden_ids = self._control_ids - {_unknown_id(backend, files)}
        self.control_tokens = ControlTokens(added[id_].content for id_ in self._control_ids)
        self._added_pattern = _pattern(list(added.values()))
        self._visible = {token.content: id_ for id_, token in added.items() if token.content and not token.special}
        visible = "|".join(map(re.escape, sorted(self._visible, key=len, reverse=True)))
        self._visible_pattern = re.compile(f"({visible})") if visible else None
        self._longest_added = max((len(token.content) for token in added.values()), default=0)
        self._plain_start = self._plain_variant(continuing=False)
        self._plain_continuing = self._plain_variant(continuing=True)
        self._prefix, self._suffix = self._added_by_post_processor()
        eos = self.special_tokens.get("eos_token")
        eos_id = backend.token_to_id(eos) if eos is not None else None
        self.end_token_ids = files.end_token_ids or frozenset({eos_id} if eos_id is not None else ())

    @classmethod
    def from_folder(cls, folder: Path, files: PromptFiles | None = None) -> Tokenizer:
        """Read a folder or GGUF file. Raises ModelLoadError if the tokenizer is missing or incomplete."""
        files = files or read_prompt_files(folder)
        if (file := language_model(folder)) is not None:
            return cls._checked(read_tokenizer(file), files, file)
        check_sizes(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            return cls._checked(_converted(folder, files), files, folder)
        try:
            data = path.read_bytes()
            check_tokenizer(data)
            return cls._checked(tokenizers.Tokenizer.from_buffer(data), files, path)
        except ModelLoadError:
            raise
        except BaseException as error:  # the library raises bare Exceptions
            if not (isinstance(error, Exception) or _is_panic(error)):
                raise
            raise ModelLoadError(f"{path} cannot be read: {error}") from error

    @classmethod
    def _checked(cls, backend: tokenizers.Tokenizer, files: PromptFiles, place: Path) -> Tokenizer:
        check_complete(backend, files, str(place))
        return cls(backend, files)

    @property
    def vocab_size(self) -> int:
        """Count token ids, including added tokens."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def digest(self) -> bytes:
        """Digest everything that token ids of a text depend on."""
        return blake3(self._backend.to_str().encode()).digest()

    @cached_property
    def decoder_steps(self) -> dict[str, Any] | None:
        decoder = self._backend.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    def token(self, token_id: int) -> str | None:
        """Return a token; None: out of range."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def mark_images(self, mark: str) -> None:
        """Set what chat templates write for an image, without tokens around it."""
        self.image_mark, self._image = mark, self.image_token

    def write_media(self, text: str) -> str:
        """Replace image marks by an image's tokens, and remove frame tokens around video placeholders."""
        if self.frame_ends is not None and self.video_token is not None:
            begin, end = self.frame_ends
            text = text.replace(begin + self.video_token + end, self.video_token)
        if self.image_mark is None or self._image is None:
            return text
        return text.replace(self.image_mark, self._image)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Read control tokens too. BOS is not added to a text that starts with it."""
        bos = self.special_tokens.get("bos_token")
        add_special_tokens = add_special_tokens and not (bos and text.startswith(bos))
        return self._ids(self._backend, text, add_special_tokens=add_special_tokens)

    def encode_pair(self, first: str, second: str) -> list[int]:
        for text in (first, second):
            self._check_time(self._backend, text)
        return list(_encoding(self._backend, first, second, add_special_tokens=True).ids)

    def encode_inside(self, text: str) -> list[int]:
        """Token ids of text after other text. Only special tokens are not read in it."""
        if self._visible_pattern is None:
            return self._ids(self._plain_continuing, text)
        ids: list[int] = []
        for part in filter(None, self._visible_pattern.split(text)):
            added = self._visible.get(part)
            ids += self._ids(self._plain_continuing, part) if added is None else [added]
        return ids

    def check_length(self, texts: Iterable[str], max_tokens: int) -> None:
        """Reject text that is far too long for `max_tokens`, in time that depends only on `max_tokens`.

        Text longer than `max_tokens` of the longest token is not tokenized. Other long text is counted in pieces, up to
        four times `max_tokens`. Raises PromptTooLongError and CancelledWorkError.
        """
        texts = list(texts)
        size = sum(map(len, texts))
        if size <= max_tokens * _USUAL_CHARACTERS:
            return
        if size > max_tokens * _MOST_CHARACTERS and size > max_tokens * self._longest_token:
            raise PromptTooLongError.of(size // self._longest_token, max_tokens, param="messages", exact=False)
        count = 0
        for text in texts:
            self._check_time(self._plain_start, text)
            for start in range(0, len(text), _PIECE):
                check_cancelled()
                count += len(_encoding(self._plain_start, text[start : start + _PIECE]))
                if count > max_tokens * _EXCESS:
                    raise PromptTooLongError.of(count, max_tokens, param="messages", exact=False)

    @cached_property
    def _longest_token(self) -> int:
        """Characters; byte vocabularies use at least one for each character."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=0)

    def encode_quoted(self, text: str, quotation: Quotation, *, add_special_tokens: bool = False) -> list[int]:
        """Read quoted parts as plain text.

        Raises InvalidRequestError if the tokenizer writes a quoted part as a control token.
        """
        bos = self.special_tokens.get("bos_token")
        # Some templates write BOS themselves, PaliGemma's after the images.
        framed = add_special_tokens and not (bos and bos in text)
        if quotation.is_empty:
            return self.encode(text, add_special_tokens=framed)
        ids = list(self._prefix) if framed else []
        done = 0
        trim = False
        for match in find_all(self._added_pattern, text, self._longest_added):
            id_, token = self._added[match[0]]
            segment = text[done : match.start()]
            ids += self._encode_plain(segment, quotation, first=done == 0, left=trim, right=token.lstrip)
            ids.append(id_)
            done, trim = match.end(), token.rstrip
        ids += self._encode_plain(text[done:], quotation, first=done == 0, left=trim, right=False)
        return ids + list(self._suffix) if framed else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _encode_plain(self, text: str, quotation: Quotation, *, first: bool, left: bool, right: bool) -> list[int]:
        text = text.lstrip() if left else text
        text = text.rstrip() if right else text
        if not text:
            return []
        plain = quotation.unquote(text)
        encoder = self._plain_start if first else self._plain_continuing
        ids = self._ids(encoder, plain)
        if self._forbidden_ids.isdisjoint(ids):
            return ids
        # Some vocabularies have a control token as an ordinary word, but not as single characters.
        cuts = {at for start, end in quotation.quoted_spans(text) for at in range(start, end + 1)}
        ids, done = [], 0
        for cut in sorted(cuts | {len(plain)}):
            check_cancelled()
            encoder = self._plain_start if first and done == 0 else self._plain_continuing
            ids += self._ids(encoder, plain[done:cut])
            done = cut
        if not self._forbidden_ids.isdisjoint(ids):
            raise InvalidRequestError("the text contains a control token of the model", param="messages")
        return ids

    def _ids(self, encoder: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self._check_time(encoder, text)
        return list(_encoding(encoder, text, add_special_tokens=add_special_tokens).ids)

    def _check_time(self, encoder: tokenizers.Tokenizer, text: str) -> None:
        if len(text) > SHORT_TEXT and self._is_quadratic:
            check_time(lambda piece: _encoding(encoder, piece), text)

    @cached_property
    def _is_quadratic(self) -> bool:
        try:
            return is_quadratic(lambda run: _encoding(self._plain_start, run))
        except InvalidRequestError:  # a pattern gives up
            return True

    def _plain_variant(self, *, continuing: bool) -> tokenizers.Tokenizer:
        """Leave out added tokens. continuing: for text that does not begin a prompt."""
        variant = tokenizers.Tokenizer(self._backend.model)
        pre_tokenizer = self._backend.pre_tokenizer
        if pre_tokenizer is not None:
            variant.pre_tokenizer = _without_first_space(pre_tokenizer) if continuing else pre_tokenizer
        if self._backend.normalizer is not None:
            variant.normalizer = self._backend.normalizer
        return variant

    def _added_by_post_processor(self) -> tuple[list[int], list[int]]:
        plain = self._backend.encode("a", add_special_tokens=False).ids
        framed = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(framed) - len(plain) + 1):
            if framed[start : start + len(plain)] == plain:
                return framed[:start], framed[start + len(plain) :]
        return [], []


def _encoding(
    encoder: tokenizers.Tokenizer, text: str, pair: str | None = None, *, add_special_tokens: bool = False
) -> tokenizers.Encoding:
    """Raises InvalidRequestError if a pattern of the tokenizer gives up."""
    try:
        # Unlike `encode` this releases the GIL and computes no offsets.
        return encoder.encode_batch_fast(
            [text if pair is None else (text, pair)], add_special_tokens=add_special_tokens
        )[0]
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise InvalidRequestError(
            f"the model's tokenizer fails for this text; send another text ({error})", param="messages"
        ) from None


def _is_panic(error: BaseException) -> bool:
    """The exception class of the library's panics cannot be imported."""
    return type(error).__name__ == "PanicException"


def _complete(backend: tokenizers.Tokenizer, files: PromptFiles) -> None:
    """Add tokens of tokenizer_config.json that tokenizer.json lacks. The latter says whether to add BOS and EOS."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = files.tokenizer_config.get("added_tokens_decoder") or {}
    check_count(len(declared), "tokenizer_config.json")
    missing, ids = [], []
    for id_, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        if isinstance(entry, dict) and entry.get("content") and entry["content"] not in known:
            flags = {name: entry[name] for name in ("lstrip", "rstrip", "normalized", "single_word") if name in entry}
            missing.append(AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags))
            ids.append(int(id_))
    backend.add_tokens(missing)
    check_added(backend, zip(ids, (token.content for token in missing), strict=True))
    known |= {token.content for token in missing}
    named = [token for token in files.special_tokens.values() if token not in known]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named])


def _unknown_id(backend: tokenizers.Tokenizer, files: PromptFiles) -> int | None:
    token = files.special_tokens.get("unk_token") or getattr(backend.model, "unk_token", None)
    return backend.token_to_id(token) if token is not None else getattr(backend.model, "unk_id", None)


def _ensure_token(backend: tokenizers.Tokenizer, token_id: int | None, meaning: str) -> str | None:
    """Register a token as special, and return it."""
    if token_id is None:
        return None
    token = backend.id_to_token(token_id)
    if token is None:
        raise UnsupportedModelError(
            f"config.json names token {token_id} as {meaning}, "
            f"but the tokenizer has only {backend.get_vocab_size()} tokens"
        )
    if token not in {added.content for added in backend.get_added_tokens_decoder().values()}:
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    return str(token)


def _pattern(tokens: list[AddedToken]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=lambda token: len(token.content), reverse=True)
    alternatives = [
        rf"(?<!\w){re.escape(token.content)}(?!\w)" if token.single_word else re.escape(token.content)
        for token in longest_first
    ]
    return re.compile("|".join(alternatives) or "(?!)")


def _without_first_space(pre_tokenizer: tokenizers.pre_tokenizers.PreTokenizer) -> Any:
    """Remove the space that some add before the first word."""
    state = json.loads(pre_tokenizer.__getstate__())
    _replace_values(state, "prepend_scheme", "first", "never")
    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    return tokenizers.Tokenizer.from_str(json.dumps({**empty, "pre_tokenizer": state})).pre_tokenizer


def _replace_values(node: Any, key: str, old: str, new: str) -> None:
    if isinstance(node, dict):
        if node.get(key) == old:
            node[key] = new
        for value in node.values():
            _replace_values(value, key, old, new)
    elif isinstance(node, list):
        for value in node:
            _replace_values(value, key, old, new)


def _converted(folder: Path, files: PromptFiles) -> tokenizers.Tokenizer:
    if files.converter is not None:
        tokenizer: tokenizers.Tokenizer = pkgutil.resolve_name(files.converter)(folder)
        return tokenizer
    if "auto_map" in files.tokenizer_config:
        raise UnsupportedModelError(
            f"the tokenizer of {folder} is Python code, which is never run; convert it to tokenizer.json with "
            "Transformers' save_pretrained"
        )
    try:
        from transformers import AutoTokenizer

        converted = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers raises anything for a folder without tokenizer
        raise ModelLoadError(f"{folder} has no tokenizer that can be read: {error}") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(f"the tokenizer of {folder}, {type(converted).__name__}, has no fast form")
    return tokenizers.Tokenizer.from_str(backend.to_str())
