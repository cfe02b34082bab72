"""Documents of a conversation: each becomes the images of its pages, where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vlmserve.config import MediaConfig
from vlmserve.errors import InvalidRequestError, TooManyImagesError
from vlmserve.frontend.messages import Medium
from vlmserve.media.documents import DocumentReader
from vlmserve.media.sources import source_name
from vlmserve.prompt.template import ImagePart, Message, Part


def with_pages(
    messages: Sequence[Message], media: Sequence[Medium], reader: DocumentReader, limits: MediaConfig
) -> tuple[list[Message], list[Medium]]:
    """The same conversation with images of pages in the place of documents. Pages are rendered when they are prepared.

    media: of all parts that are no text, in order. Raises TooManyImagesError for too many documents, and as
    `DocumentReader.pages` does, naming the place.
    """
    count = sum(medium.kind == "document" for medium in media)
    if count > limits.max_documents:
        raise TooManyImagesError(
            f"the request has {count} documents; at most {limits.max_documents} are allowed (--max-documents)",
            param="messages",
        )
    left = limits.max_document_pages
    rest = iter(media)
    shown: list[Message] = []
    expanded: list[Medium] = []
    for message in messages:
        parts: list[Part] = []
        for part in message.parts:
            if isinstance(part, str):
                parts.append(part)
                continue
            medium = next(rest)
            if medium.kind != "document":
                parts.append(part)
                expanded.append(medium)
                continue
            pages = _pages(medium, reader, left)
            left -= len(pages)
            parts += [ImagePart()] * len(pages)
            expanded += pages
        shown.append(replace(message, parts=tuple(parts)))
    return shown, expanded


def _pages(document: Medium, reader: DocumentReader, most: int) -> list[Medium]:
    """The images that a document becomes."""
    try:
        pages = reader.pages(document.source, document.pages, most)
    except InvalidRequestError as error:
        error.param = error.param or document.place
        error.source = error.source or source_name(document.source)
        raise
    return [replace(document, kind="image", source=page) for page in pages]
