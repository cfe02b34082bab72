"""Turns messages and texts into prompts."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import msgspec

from vlmserve.cancellation import check_cancelled
from vlmserve.engine.lengths import least_embedding_bytes
from vlmserve.errors import (
    InvalidRequestError,
    PromptTooLongError,
    TooManyImagesError,
)
from vlmserve.frontend.answer_formats import AnswerFormats
from vlmserve.frontend.conversations import ConversationOptions, Rendered, Renderer, texts
from vlmserve.frontend.documents import with_pages
from vlmserve.frontend.frames import FrameLimits
from vlmserve.frontend.media_preparer import KnownMedia, MediaPreparer, check_sources
from vlmserve.frontend.messages import Medium, check_begun, check_remote, check_unicode, parse_messages, with_kwargs
from vlmserve.frontend.processors import (
    image_processor,
    transformers_processor,
    video_processor,
    videos_as_images,
)
from vlmserve.media.documents import DocumentReader
from vlmserve.media.sources import ImageSource
from vlmserve.media.video_frames import FrameReader
from vlmserve.media.videos import VideoSource
from vlmserve.models.sizes import broken
from vlmserve.prompt.checkpoint import read_prompt_files
from vlmserve.prompt.decisions import read_temperature
from vlmserve.prompt.expand import check_placeholders, expand_placeholders
from vlmserve.prompt.files import read_config, read_json
from vlmserve.prompt.one_image import one_image_prompts, only_text
from vlmserve.prompt.pooling import read_vectors
from vlmserve.prompt.template import ChatTemplate, Message, read_template
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.prompt.untrusted import Quotation
from vlmserve.settings.config import EngineConfig, MediaConfig, ModelImplementation
from vlmserve.types import ModelInfo, Prompt

logger = logging.getLogger(__name__)


class RequestPreparer:
    """Makes prompts for the checkpoint in `folder`. Synchronous and thread-safe.

    implementation: decides how images become pixels. chat_template: a template or its path, in place of the
    checkpoint's. engine: settings for grammars and tool calls. Raises ModelLoadError or UnsupportedModelError for an
    unusable tokenizer, template or image processor.
    """

    def __init__(
        self,
        folder: Path,
        media: MediaConfig,
        implementation: ModelImplementation = "auto",
        chat_template: str | None = None,
        *,
        engine: EngineConfig | None = None,
    ) -> None:
        with broken(folder):
            self._set_up(folder, media, implementation, chat_template, engine or EngineConfig.model_validate({}))

    def _set_up(
        self,
        folder: Path,
        media: MediaConfig,
        implementation: ModelImplementation,
        chat_template: str | None,
        engine: EngineConfig,
    ) -> None:
        files = read_prompt_files(folder)
        template = files.chat_template if chat_template is None else read_template(chat_template)
        self._folder = folder
        self.max_prompt_len: int | None = None
        """Maximum tokens of a prompt, once the engine has reported it; None: no limit."""
        self.tokenizer = Tokenizer.from_folder(folder, files)
        self._one_image = one_image_prompts(read_config(folder))
        supports_images = self.tokenizer.image_token_id is not None or self._one_image is not None
        theirs = implementation == "transformers" or (implementation == "auto" and not files.has_own_preprocessing)
        choose = transformers_processor if theirs else image_processor
        # before the template: it adds the placeholder that the processor reads
        processor = choose(folder, self.tokenizer, media) if supports_images else None
        self.media = MediaPreparer(media, processor, engine.encoder_cache_memory, in_one_file=folder.is_file())
        if supports_images and engine.disk_cache:
            from vlmserve.frontend.stored_images import StoredImages

            self.media.image_cache.stored = StoredImages.open(engine, folder, self.tokenizer)
        self.media.check_cache(least_embedding_bytes(engine, folder))
        self._template = None if template is None else _compile(template, self.tokenizer)
        with_tools = self._template
        if chat_template is None and files.tool_template is not None:
            with_tools = _compile(files.tool_template, self.tokenizer)
        self.vectors = read_vectors(folder, None if engine.pooling == "auto" else engine.pooling)
        self.decision_temperature = read_temperature(folder)
        self.answers = AnswerFormats(folder, self.tokenizer, self._template, with_tools, engine)
        self._renderer = None
        if self._template is not None and with_tools is not None:
            self._renderer = Renderer(self._template, with_tools, self.tokenizer, self.answers, supports_images)
        video_token = self.tokenizer.video_token
        # The chat template may not know the videos that the model takes.
        supports_videos = video_token is not None and not theirs and (template is None or video_token in template)
        if supports_videos:
            self.media.video_processor = video_processor(folder, self.tokenizer, media)
        elif processor is not None and self._template is not None and not self._one_image:
            cache = self.media.image_cache
            self.media.videos_as_images = videos_as_images(folder, self.tokenizer, media, processor, cache)

    def fit(self, info: ModelInfo) -> None:
        """Adopt the engine's limits. Raises CapacityError if its encoder cache cannot hold a small image."""
        self.max_prompt_len = info.max_prompt_len
        self.media.fit(info)

    def tokenizer_info(self) -> dict[str, Any]:
        """tokenizer_config.json with the chat template and special tokens in use."""
        template = None if self._template is None else self._template.source
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **read_json(self._folder / "tokenizer_config.json"),
            **self.tokenizer.special_tokens,
            "chat_template": template,
        }

    @property
    def takes_one_image(self) -> bool:
        return self._one_image is not None

    @property
    def can_chat(self) -> bool:
        return self._template is not None or self._one_image is not None

    @property
    def takes_tools(self) -> bool:
        return self._template is not None

    @property
    def template_settings(self) -> frozenset[str]:
        renderer = self._renderer
        return frozenset() if renderer is None else renderer.template.settings | renderer.tool_template.settings

    def chat(self, messages: Sequence[Any], **options: Unpack[ConversationOptions]) -> Prompt:
        """Make the prompt of a conversation in OpenAI's form.

        Control tokens in texts have no effect. Raises InvalidRequestError, naming the place in `messages`, or a
        subclass for an image or far too long text; CancelledWorkError.
        """
        return self.conversation(messages, **options).prompt()

    def conversation(
        self, messages: Sequence[Any], known: KnownMedia | None = None, **options: Unpack[ConversationOptions]
    ) -> Conversation:
        """Like `chat`, in steps that the caller runs. known: see `MediaPreparer.prepare_all`."""
        return Conversation(self, messages, options, known)

    def text(
        self,
        text: str,
        images: Sequence[ImageSource] = (),
        videos: Sequence[VideoSource] = (),
        *,
        allow_local: bool = False,
        cache_salt: str = "",
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Make a prompt of text that contains the model's placeholder for each image and video.

        For a model that takes one image and one text, `text` may be empty. Raises as `chat` does, and
        InvalidRequestError if placeholders and media differ in number.
        """
        if not isinstance(text, str) or not (text or self._one_image):
            raise InvalidRequestError("the prompt must be a non-empty string", param="prompt")
        check_unicode(text, "prompt")
        self._check_length([text])
        self.media.check_images(len(images), param="images")
        self.media.check_videos(len(videos), param="videos")
        if videos and self.media.video_processor is None:
            raise InvalidRequestError(
                "this model sees a video as images of its frames, for which a text has no place; send it in a "
                "conversation (chat), or its frames as images",
                param="videos",
            )
        media = [Medium("image", f"images[{index}]", one, is_local=allow_local) for index, one in enumerate(images)]
        media += [Medium("video", f"videos[{index}]", one, is_local=allow_local) for index, one in enumerate(videos)]
        media = with_kwargs(media, mm_processor_kwargs)
        if not allow_local:
            for medium in media:
                check_remote(medium.source, medium.place)
        if self._one_image is not None:
            return self._with_one_image(text, media, cache_salt, param="images")
        ids, count = self.tokenizer.encode(self.tokenizer.write_media(text)), len(images)
        return self._expand(ids, media[:count], media[count:], cache_salt)

    def check_files(self, messages: Sequence[Any]) -> None:
        """Check a local caller's conversation, and that files exist, before preparing it. Raises as `chat` does."""
        _, media = parse_messages(messages, allow_local=True)
        check_sources([(medium.place, medium.source) for medium in media])

    def prompt_text(self, prompt: Prompt) -> str:
        ids: list[int] = []
        start = 0
        for span in prompt.images:
            ids += [*prompt.token_ids[start : span.start], prompt.token_ids[span.placement.shown[0]]]
            start = span.end
        return self.tokenizer.decode([*ids, *prompt.token_ids[start:]], skip_special_tokens=False)

    def tokens(self, token_ids: Sequence[int]) -> Prompt:
        """Make a prompt of token ids. Raises InvalidRequestError for an image placeholder."""
        if self._one_image is not None:
            raise InvalidRequestError("this model needs one image with each request", param="prompt")
        if self.max_prompt_len is not None and len(token_ids) > self.max_prompt_len:
            raise PromptTooLongError.of(len(token_ids), self.max_prompt_len, param="prompt")
        return self._expand(list(token_ids), [], [], "")

    def encode(
        self, text: str, pair: str | None = None, *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        """Tokenize a text, including control tokens. Raises InvalidRequestError for invalid text.

        pair: a second text, which the tokenizer joins to the first. param: the field that errors name.
        """
        check_unicode(text, param)
        check_unicode(pair or "", param)
        self._check_length([text, pair or ""])
        if pair is not None:
            return self.tokenizer.encode_pair(text, pair)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises InvalidRequestError for an unknown id."""
        self.token_texts(token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary writes them. Raises InvalidRequestError for an unknown id."""
        texts = []
        for index, token_id in enumerate(token_ids):
            text = self.tokenizer.token(token_id)
            if text is None:
                raise InvalidRequestError(
                    f"tokens[{index}] is {token_id}, which is not in the vocabulary of {self.tokenizer.vocab_size}; "
                    "send ids that this model's tokenizer gives",
                    param=f"tokens[{index}]",
                )
            texts.append(text)
        return texts

    def _read_conversation(
        self, messages: Sequence[Any], options: ConversationOptions, documents: DocumentReader, frames: FrameReader
    ) -> tuple[Sequence[Message], Sequence[Medium]]:
        """Replace documents by images, and videos too if the model takes only images."""
        parsed, media = parse_messages(messages, allow_local=options.get("allow_local", False))
        if options.get("continue_final_message"):
            check_begun(parsed)
        media = with_kwargs(media, options.get("mm_processor_kwargs"))
        shown = [[message.parts, message.tool_calls, message.reasoning] for message in parsed]
        self._check_length(texts(shown, options.get("tools"), options.get("template_settings")))
        self.media.check(media)
        parsed, media = with_pages(parsed, media, documents, self.media.config, self.media.usual)
        if self.media.videos_as_images is None:
            return parsed, media
        limits = FrameLimits(self.max_prompt_len, self.media.usual)
        return self.media.videos_as_images.show(parsed, media, frames, limits)

    def _render(
        self, messages: Sequence[Message], media: Sequence[Medium], options: ConversationOptions
    ) -> Rendered | None:
        """None for a model that takes one image and one text."""
        if self._one_image is not None:
            if options.get("continue_final_message"):
                raise InvalidRequestError("this model cannot continue answers", param="continue_final_message")
            if options.get("tools") is not None:
                raise InvalidRequestError("this model cannot call functions; leave tools out", param="tools")
            return None
        if self._renderer is None:
            raise InvalidRequestError(
                "the model has no chat template; use completions, or add a chat_template.jinja to the checkpoint",
                param="messages",
            )
        return self._renderer.render(messages, Counter(medium.kind for medium in media), options)

    def _with_one_image(self, text: str, images: Sequence[Medium], salt: str, *, param: str) -> Prompt:
        assert self._one_image is not None
        if len(images) != 1:
            raise (TooManyImagesError if images else InvalidRequestError)(
                f"this model needs one image with each request, not {len(images)}", param=param
            )
        if not (text or self._one_image.describes):
            raise InvalidRequestError("this model answers questions: ask one about the image", param=param)
        quotation = Quotation(self.tokenizer.control_tokens)

        def encode(text: str, framed: bool) -> list[int]:
            return self.tokenizer.encode_quoted(quotation.quote(text), quotation, add_special_tokens=framed)

        return self._one_image.prompt(self.media.prepare(images[0], salt), text, encode)

    def _check_length(self, texts: Iterable[str]) -> None:
        check_cancelled()
        if self.max_prompt_len is not None:
            self.tokenizer.check_length(texts, self.max_prompt_len)

    def _expand(
        self,
        ids: Sequence[int],
        images: Sequence[Medium],
        videos: Sequence[Medium],
        salt: str,
        known: KnownMedia | None = None,
    ) -> Prompt:
        """Expand one placeholder for each medium. Checks everything before reading an image.

        known: see `MediaPreparer.prepare_all`.
        """
        image_token_id, video_token_id = self.tokenizer.image_token_id, self.tokenizer.video_token_id
        check_placeholders(ids, image_token_id, len(images))
        check_placeholders(ids, video_token_id, len(videos), "video")
        prepared = self.media.prepare_all([*images, *videos], salt, known)
        count = len(images)
        return expand_placeholders(
            ids,
            image_token_id,
            prepared[:count],
            video_token_id,
            prepared[count:],
            frames_are_images=self.tokenizer.frames_are_images,
            label=self.media.label,
        )


class _Media:
    """known: see `MediaPreparer.prepare_all`."""

    def __init__(self, media: MediaPreparer, salt: str, known: KnownMedia | None = None) -> None:
        self.documents = DocumentReader(media.config, media.page_counts, salt)
        self.frames = FrameReader(media.config, salt)
        self.known: KnownMedia = {} if known is None else known

    def close(self) -> None:
        self.documents.close()
        self.frames.close()

    def forget(self) -> None:
        self.documents.forget()
        self.known = {}


class Conversation:
    """Makes the prompt of a conversation. Repeats no work, except after `forget`. Not thread-safe."""

    def __init__(
        self,
        preparer: RequestPreparer,
        messages: Sequence[Any],
        options: ConversationOptions,
        known: KnownMedia | None = None,
        shared: _Media | None = None,
    ) -> None:
        """known: see `MediaPreparer.prepare_all`. shared: media that the caller closes."""
        self._preparer = preparer
        self._messages = messages
        self._options = options
        self._salt = options.get("cache_salt", "")
        self._media = shared or _Media(preparer.media, self._salt, known)
        self._closing = contextlib.nullcontext if shared is not None else partial(contextlib.closing, self._media)
        self._read: tuple[Sequence[Message], Sequence[Medium]] | None = None
        """Messages and media. Pages and frames replace documents and videos."""
        self._rendered: Rendered | None = None

    def forget(self) -> None:
        """Close documents and videos. The next call reopens them."""
        self._read = None
        self._media.forget()

    def read(self) -> None:
        """Open documents and videos. Raises as `RequestPreparer.chat` does."""
        with self._closing():
            self._open()

    def render(self) -> None:
        """Raises as `read` does, and SlowRenderingError within `only_quick`."""
        with self._closing():
            self._render()

    def prompt(self) -> Prompt:
        """Raises as `render` does."""
        with self._closing():
            self._render()
            messages, media = self._open()
            images = [medium for medium in media if medium.kind == "image"]
            videos = [medium for medium in media if medium.kind == "video"]
            if self._rendered is None:
                return self._preparer._with_one_image(only_text(messages), images, self._salt, param="messages")
            prompt = self._preparer._expand(self._rendered.token_ids, images, videos, self._salt, self._media.known)
            return msgspec.structs.replace(prompt, thoughts=self._rendered.thoughts)

    def _open(self) -> tuple[Sequence[Message], Sequence[Medium]]:
        if self._read is None:
            media = self._media
            self._read = self._preparer._read_conversation(self._messages, self._options, media.documents, media.frames)
        return self._read

    def _render(self) -> None:
        opened = self._open()
        if self._rendered is None:
            self._rendered = self._preparer._render(*opened, self._options)


def chats_of(
    preparer: RequestPreparer, conversations: Iterable[Sequence[Any]], **options: Unpack[ConversationOptions]
) -> list[Prompt]:
    """Prompts of conversations that share media. Raises as `RequestPreparer.chat` does."""
    with contextlib.closing(_Media(preparer.media, options.get("cache_salt", ""))) as media:
        return [Conversation(preparer, messages, options, shared=media).prompt() for messages in conversations]


def embedded_text(preparer: RequestPreparer, text: str) -> Prompt:
    """Raises as `RequestPreparer.text` and `chat` do."""
    options = preparer.vectors.message_options
    if options is None:
        return preparer.text(text)
    check_unicode(text, "prompt")
    return preparer.chat([{"role": "user", "content": text}], **options)


def _compile(template: str, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(template, tokenizer.special_tokens, tokenizer.image_mark, tokenizer.video_token)
