"""Documents of a conversation: each becomes the images of its pages, where it stands."""

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
    """The same conversation with images of pages in the place of documents. Pages are rendered when they are prepared.

    media: of all parts that are no text, in order. usual: sizes by what pages cost; None: any. Raises
    TooManyImagesError for too many documents, and as `DocumentReader.pages` does, naming the place.
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
    """The images that a document becomes."""
    try:
        pages = reader.pages(document.source, document.pages, most)
    except InvalidRequestError as error:
        error.param = error.param or document.place
        error.source = error.source or source_name(document.source)
        raise
    return [replace(document, kind="image", source=page) for page in pages]
