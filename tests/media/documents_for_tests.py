"""PDF files, right and wrong, written byte by byte."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

LETTER = (612, 792)


@dataclass(frozen=True)
class PageContent:
    """A page. size: in points. content: PDF operators. resources: of the page, with object numbers from 10,000 on."""

    content: bytes = b""
    size: tuple[float, float] = LETTER
    resources: bytes = b""
    more: bytes = b""


def page(content: str = "", size: tuple[float, float] = LETTER, **fields: bytes) -> PageContent:
    return PageContent(content.encode(), size, **fields)


def square(colour: str, side: int = 100) -> str:
    """A filled square in the lower left corner. colour: red, green and blue from 0 to 1."""
    return f"{colour} rg 0 0 {side} {side} re f"


def stream(data: bytes, fields: bytes = b"", *, compressed: bool = False) -> bytes:
    if compressed:
        data, fields = zlib.compress(data), fields + b"/Filter/FlateDecode"
    return b"<</Length %d %s>>stream\n" % (len(data), fields) + data + b"\nendstream"


def form(content: bytes, resources: bytes = b"") -> bytes:
    """An object that other contents may draw."""
    return stream(content, b"/Type/XObject/Subtype/Form/BBox[0 0 600 600]/Resources<<%s>>" % resources)


def written(objects: dict[int, bytes], trailer: bytes = b"") -> bytes:
    """A file of numbered objects; the first is the catalog."""
    out, offsets = bytearray(b"%PDF-1.7\n"), {}
    for number, body in objects.items():
        offsets[number] = len(out)
        out += b"%d 0 obj\n" % number + body + b"\nendobj\n"
    start = len(out)
    out += b"xref\n0 1\n0000000000 65535 f \n"
    for number, offset in offsets.items():
        out += b"%d 1\n%010d 00000 n \n" % (number, offset)
    out += b"trailer\n<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF\n" % (max(objects) + 1, trailer, start)
    return bytes(out)


def pdf_file(pages: Sequence[PageContent], shared: dict[int, bytes] | None = None, trailer: bytes = b"") -> bytes:
    """A PDF of these pages. shared: objects that their resources name."""
    kids = b" ".join(b"%d 0 R" % (3 + 2 * index) for index in range(len(pages)))
    objects = {1: b"<</Type/Catalog/Pages 2 0 R>>", 2: b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, len(pages))}
    for index, one in enumerate(pages):
        width, height = one.size
        objects[3 + 2 * index] = (
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 %s %s]/Contents %d 0 R/Resources<<%s>>%s>>"
            % (b"%.4f" % width, b"%.4f" % height, 4 + 2 * index, one.resources, one.more)
        )
        objects[4 + 2 * index] = stream(one.content)
    return written(objects | (shared or {}), trailer)


def encrypted() -> bytes:
    """A file that needs a password."""
    key = b"<" + b"7a" * 32 + b">"
    encrypt = b"/Encrypt<</Filter/Standard/V 1/R 2/P -4/O%s/U%s>>/ID[<%s><%s>]" % (key, key, b"31" * 16, b"31" * 16)
    return pdf_file([page(square("1 0 0"))], trailer=encrypt)


def slow() -> bytes:
    """A page whose drawing takes far longer than anybody waits: a path that crosses itself half a million times."""
    path = "0 0 m " + "600 700 l 0 0 l " * 500_000 + "S"
    return pdf_file([page(path)])


def exponential(levels: int = 12) -> bytes:
    """A few kilobytes that draw ten to the power of `levels` squares."""
    shared = {
        10_000 + level: form(b"/F Do " * 10, b"/XObject<</F %d 0 R>>" % (10_001 + level)) for level in range(levels)
    }
    shared[10_000 + levels] = form(b"0 0 500 500 re f")
    return pdf_file([page("/F Do", resources=b"/XObject<</F 10000 0 R>>")], shared)


def recursive() -> bytes:
    """An object that draws itself, twice."""
    shared = {10_000: form(b"/F Do /F Do", b"/XObject<</F 10000 0 R>>")}
    return pdf_file([page("/F Do", resources=b"/XObject<</F 10000 0 R>>")], shared)


def cyclic() -> bytes:
    """A tree of pages that contains itself."""
    return written({1: b"<</Type/Catalog/Pages 2 0 R>>", 2: b"<</Type/Pages/Kids[2 0 R]/Count 5>>"})


def bomb(side: int = 10_000) -> bytes:
    """A page with an image that takes 300 MB once it is unpacked."""
    image = b"/Subtype/Image/Width %d/Height %d/BitsPerComponent 8/ColorSpace/DeviceRGB" % (side, side)
    packer = zlib.compressobj(1)
    data = b"".join(packer.compress(bytes(3 * side)) for _ in range(side)) + packer.flush()
    shared = {10_000: stream(data, image + b"/Filter/FlateDecode")}
    return pdf_file([page("600 0 0 600 0 0 cm /I Do", resources=b"/XObject<</I 10000 0 R>>")], shared)


def claims(count: int) -> bytes:
    """A file of one page that says it has so many."""
    tree = b"<</Type/Pages/Kids[3 0 R]/Count %d>>" % count
    return written(
        {1: b"<</Type/Catalog/Pages 2 0 R>>", 2: tree, 3: b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 10 10]>>"}
    )
