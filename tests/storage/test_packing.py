"""Data URLs are kept aside, and come back as they were."""

from __future__ import annotations

import base64

from hypothesis import given
from hypothesis import strategies as st

from vlmserve.storage.items import digest_of, pack, unpack

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_URL = st.binary(max_size=40).map(lambda data: "data:image/png;base64," + base64.b64encode(data).decode())
_SLOPPY = st.sampled_from(["data:image/png;base64,QQ", "data:;base64,Q Q==", "data:image/png;base64,QR==", "data:,x"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _TEXT | _URL | _SLOPPY,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(_VALUES)
def test_any_value_comes_back_as_it_was(value):
    body, blobs = pack(value)
    assert unpack(body, blobs) == value


def test_equal_images_become_one_blob_outside_text():
    data = bytes(range(256))
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    body, blobs = pack({"a": [url, url], "b": url})
    assert blobs == {digest_of(data): data}
    assert base64.b64encode(data).decode() not in body


def test_unusual_image_spelling_stays_text():
    for url in ("data:image/png;base64,QR==", "data:image/png;base64,Q\nQ==", "data:text/plain,hello"):
        assert pack(url)[1] == {}
