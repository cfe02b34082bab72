"""Replaces documents in conversations by images of their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vlmserve.errors import InvalidRequestError, TooManyImagesError
from vlmserve.frontend.messages import Medium, replace_media
from vlmserve.media.documents import DocumentReader
from vlmserve.media.sources import source_name
from vlmserve.media.usual_sizes import UsualSizes
from vlmserve.prompt.template import ImagePart, Message, Part
from vlmserve.settings.config import MediaConfig


def with_pages(
    messages: Sequence[Message],
    media: Sequence[Medium],
    reader: DocumentReader,
    limits: MediaConfig,
    usual: UsualSizes | None = None,
) -> tuple[list[Message], list[Medium]]:
    """Replace documents by images of their pages, which are rendered only when prepared.

    media: all parts that are not text, in order. usual: page sizes by cost. Raises TooManyImagesError, and as
    `DocumentReader.pages` does.
    """
    count = sum(medium.kind == "document" for medium in media)
    if count > limits.max_documents:
        raise TooManyImagesError(
            f"the request has {count} documents; at most {limits.max_documents} are allowed (--max-documents)",
            param="messages",
        )
    left = limits.max_document_pages

    def expand(document: Medium) -> tuple[list[Part], list[Medium]]:
        nonlocal left
        pages = _pages(document, reader, left)
        left -= len(pages)
        if usual is not None:
            budget = usual.for_images(document.budget, len(pages))
            pages = [replace(page, budget=budget) for page in pages]
        return [ImagePart()] * len(pages), pages

    return replace_media(messages, media, "document", expand)


def _pages(document: Medium, reader: DocumentReader, most: int) -> list[Medium]:
    try:
        pages = reader.pages(document.source, document.pages, most)
    except InvalidRequestError as error:
        error.param = error.param or document.place
        error.source = error.source or source_name(document.source)
        raise
    return [replace(document, kind="image", source=page) for page in pages]
