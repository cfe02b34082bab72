from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.media.images_for_tests import noise
from vlmserve.media.keys import image_key, pil_image_key
from vlmserve.types import KEY_BYTES

PRINT = bytes(32)


@given(
    a=st.tuples(st.binary(max_size=6), st.binary(max_size=6)), b=st.tuples(st.binary(max_size=6), st.binary(max_size=6))
)
def test_equal_keys_need_equal_bytes_and_preprocessing(a: tuple[bytes, bytes], b: tuple[bytes, bytes]) -> None:
    assert (image_key(*a) == image_key(*b)) == (a == b)
    assert len(image_key(*a)) == KEY_BYTES


def test_bytes_do_not_move_between_file_and_fingerprint() -> None:
    assert image_key(b"ab", b"c") != image_key(b"a", b"bc")


def test_decoded_image_key_covers_its_pixels() -> None:
    palette = noise(6, 4, "P")
    recolored = palette.copy()
    recolored.putpalette(bytes(range(256)) * 3)
    transparent = palette.copy()
    transparent.info["transparency"] = 0
    rotated = noise(6, 4)
    rotated.getexif()[0x0112] = 6
    images = [
        noise(6, 4),
        noise(6, 4, seed=1),
        noise(6, 4, "L"),
        Image.frombytes("RGB", (4, 6), noise(6, 4).tobytes()),
        rotated,
        palette,
        recolored,
        transparent,
    ]
    keys = [pil_image_key(image, PRINT) for image in images]
    assert len(set(keys)) == len(images)
    assert pil_image_key(noise(6, 4), PRINT) == keys[0]
    assert pil_image_key(noise(6, 4), bytes([1]) * 32) != keys[0]


def test_decoded_image_never_shares_a_file_key() -> None:
    image = noise(6, 4)
    assert pil_image_key(image, PRINT) != image_key(image.tobytes(), PRINT)


def test_a_salt_separates_equal_images() -> None:
    assert len({image_key(b"file", PRINT, salt) for salt in ("", "a", "b", "ab")}) == 4
    assert len({pil_image_key(noise(6, 4), PRINT, salt) for salt in ("", "a", "b", "ab")}) == 4
