"""Messages and texts to prompts: validation, chat template, tokenizer, pictures. Synchronous and thread-safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmserve.config import MediaConfig
from vlmserve.errors import InvalidRequestError, ModelLoadError, TooManyImagesError
from vlmserve.frontend.messages import check_remote, check_unicode, parse_messages
from vlmserve.media.any_size import AnySizeProcessor
from vlmserve.media.cache import PictureCache
from vlmserve.media.crops import CropProcessor
from vlmserve.media.processor import ImageProcessor, PictureProcessor
from vlmserve.media.sources import ImageSource, prepare_image
from vlmserve.prompt.checkpoint import PromptFiles, read_json
from vlmserve.prompt.detokenize import Detokenizer
from vlmserve.prompt.expand import check_placeholders, expand_placeholders
from vlmserve.prompt.one_picture import one_picture_prompts, only_text
from vlmserve.prompt.template import ChatTemplate, Message
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.prompt.untrusted import Quotation
from vlmserve.types import ImageInput, Prompt, SamplingParams


class RequestPreparer:
    """Makes prompts for the checkpoint in `folder`.

    Raises ModelLoadError or UnsupportedModelError if the folder's tokenizer, template or image processor is unusable.
    """

    def __init__(self, folder: Path, media: MediaConfig) -> None:
        files = PromptFiles.read(folder)
        self._media = media
        self.picture_cache = PictureCache(media.picture_cache_memory)
        self.tokenizer = Tokenizer.from_folder(folder, files)
        self._template = (
            ChatTemplate(files.chat_template, self.tokenizer.special_tokens, self.tokenizer.image_token)
            if files.chat_template is not None
            else None
        )
        self._one_picture = one_picture_prompts(read_json(folder / "config.json"))
        sees_images = self.tokenizer.image_token_id is not None or self._one_picture is not None
        self._processor = _image_processor(folder, media.exact_pixels) if sees_images else None

    @property
    def sees_images(self) -> bool:
        """Whether the model takes pictures."""
        return self._processor is not None

    def chat(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool = True,
        allow_local: bool = False,
        cache_salt: str = "",
    ) -> Prompt:
        """The prompt of a conversation in OpenAI's form.

        Text in it is only ever text: a placeholder or another control token that somebody writes has no effect.
        allow_local: also take ``{"type": "image", "image": …}`` parts with any `ImageSource`, and paths; for callers
        in the same process, never for what came over HTTP. cache_salt: of the request; pictures are only shared with
        requests of the same one.
        Raises InvalidRequestError, naming the place in `messages`, or one of its subclasses for a picture.
        """
        if self._one_picture is not None:
            parsed, sources = parse_messages(messages, allow_local=allow_local)
            return self._with_one_picture(only_text(parsed), sources, cache_salt, param="messages")
        if self._template is None:
            raise InvalidRequestError(
                "the model has no chat template; use completions, or add a chat_template.jinja to the checkpoint",
                param="messages",
            )
        parsed, sources = parse_messages(messages, allow_local=allow_local)
        self._check_count(len(sources), param="messages")
        quotation = Quotation(self.tokenizer.control_tokens)
        text = self._template.render(
            [_quoted(message, quotation) for message in parsed], add_generation_prompt=add_generation_prompt
        )
        # Like transformers: its processors add what the template leaves out, its tokenizers do not.
        ids = self.tokenizer.encode_quoted(text, quotation, add_special_tokens=self.sees_images)
        image_token = self.tokenizer.image_token
        if image_token is not None and text.count(image_token) != len(sources):
            raise InvalidRequestError(
                f"the model's chat template shows {text.count(image_token)} of the {len(sources)} pictures; "
                "put pictures into the messages of the user",
                param="messages",
            )
        check_placeholders(ids, self.tokenizer.image_token_id, len(sources))
        return expand_placeholders(ids, self.tokenizer.image_token_id, self._prepare(sources, cache_salt))

    def text(
        self, text: str, images: Sequence[ImageSource] = (), *, allow_local: bool = False, cache_salt: str = ""
    ) -> Prompt:
        """The prompt that `text` is, with the model's placeholder written out where each of `images` stands.

        For a model that takes one picture and one text it is that text, which may be empty. allow_local, cache_salt: as
        for `chat`. Raises as `chat` does, and InvalidRequestError if there are not as many placeholders as pictures.
        """
        if not isinstance(text, str) or not (text or self._one_picture):
            raise InvalidRequestError("the prompt must be a non-empty string", param="prompt")
        check_unicode(text, "prompt")
        self._check_count(len(images), param="images")
        sources = [(f"images[{index}]", image) for index, image in enumerate(images)]
        if not allow_local:
            for param, image in sources:
                check_remote(image, param)
        if self._one_picture is not None:
            return self._with_one_picture(text, sources, cache_salt, param="images")
        ids = self.tokenizer.encode(text)
        check_placeholders(ids, self.tokenizer.image_token_id, len(sources))
        return expand_placeholders(ids, self.tokenizer.image_token_id, self._prepare(sources, cache_salt))

    def detokenizer(self, params: SamplingParams) -> Detokenizer:
        """A new detokenizer for one answer, with the request's stop strings."""
        return Detokenizer(self.tokenizer, params.stop)

    def _with_one_picture(
        self, text: str, sources: Sequence[tuple[str, ImageSource]], salt: str, *, param: str
    ) -> Prompt:
        assert self._one_picture is not None
        if len(sources) != 1:
            raise (TooManyImagesError if sources else InvalidRequestError)(
                f"this model takes one picture with each request, not {len(sources)}", param=param
            )
        if not (text or self._one_picture.describes):
            raise InvalidRequestError("this model answers questions: ask one about the picture", param=param)
        quotation = Quotation(self.tokenizer.control_tokens)

        def encode(text: str, framed: bool) -> list[int]:
            return self.tokenizer.encode_quoted(quotation.quote(text), quotation, add_special_tokens=framed)

        (image,) = self._prepare(sources, salt)
        return self._one_picture.prompt(image, text, encode)

    def _check_count(self, count: int, param: str) -> None:
        if count and not self.sees_images:
            raise TooManyImagesError("this model cannot see pictures; send text only", param=param)
        if count > self._media.max_images:
            raise TooManyImagesError(
                f"the request has {count} pictures; at most {self._media.max_images} are allowed", param=param
            )

    def _prepare(self, sources: Sequence[tuple[str, ImageSource]], salt: str) -> list[ImageInput]:
        images = []
        for param, source in sources:
            assert self._processor is not None
            try:
                images.append(prepare_image(source, self._processor, self._media, self.picture_cache, salt=salt))
            except InvalidRequestError as error:
                error.param = error.param or param
                raise
        return images


def _quoted(message: Message, quotation: Quotation) -> Message:
    parts = (quotation.quote(part) if isinstance(part, str) else part for part in message.parts)
    return replace(message, parts=tuple(parts))


def _image_processor(folder: Path, exact_pixels: bool) -> PictureProcessor:
    config = read_json(folder / "config.json")
    if config.get("model_type") == "moondream1":
        return CropProcessor(config, exact_pixels=exact_pixels)
    settings = read_json(folder / "processor_config.json").get("image_processor")
    if not isinstance(settings, dict):
        settings = read_json(folder / "preprocessor_config.json")
    if not settings:
        raise ModelLoadError(f"{folder} has neither preprocessor_config.json nor an image processor's settings")
    if str(settings.get("image_processor_type")).startswith("Qwen2"):
        return AnySizeProcessor(settings, exact_pixels=exact_pixels)
    return ImageProcessor(config, settings, exact_pixels=exact_pixels)
