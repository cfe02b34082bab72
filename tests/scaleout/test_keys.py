"""What requests share, by their bodies alone."""

from __future__ import annotations

import base64
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlmserve.scaleout.keys import MAX_SEGMENTS, RequestKey, request_key, size_of


def image_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chat(*contents: object, **fields: object) -> dict[str, object]:
    """Turns of user and assistant, in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)], **fields}


def key(body: dict[str, object], salt: str = "", adapter: str = "", model: str = "m") -> RequestKey:
    return request_key(body, model=model, salt=salt, adapter=adapter)


def shared(one: RequestKey, other: RequestKey) -> int:
    """Estimated tokens of the beginning that two prompts share."""
    common = [a for a, b in zip(one.segments, other.segments, strict=False) if a.digest == b.digest]
    return common[-1].tokens if common else 0


def picture(data: bytes, **more: object) -> list[dict[str, object]]:
    return [{"type": "image_url", "image_url": {"url": image_url(data)}, **more}, {"type": "text", "text": "What?"}]


def test_later_turn_shares_all_earlier_turns():
    first = key(chat("a question " * 100))
    second = key(chat("a question " * 100, "an answer", "another question"))
    assert shared(first, second) == first.tokens
    assert second.homes[-1].number == first.homes[-1].number
    assert not first.continues
    assert second.continues


def test_texts_share_their_beginning_but_not_their_end():
    system = {"role": "system", "content": "be brief " * 300}
    one, other = (key({"messages": [system, {"role": "user", "content": text}]}) for text in ("this", "that"))
    assert 0 < shared(one, other) < one.tokens
    assert one.homes[0] == other.homes[0]
    assert one.homes[1] != other.homes[1]


@pytest.mark.parametrize("change", [{"salt": "tenant"}, {"adapter": "lora"}, {"model": "other"}])
def test_tenants_adapters_and_models_share_nothing(change):
    body = chat(picture(b"one image"))
    one, other = key(body), key(body, **change)
    assert shared(one, other) == 0
    assert not set(one.images) & set(other.images)
    assert not {home.number for home in one.homes} & {home.number for home in other.homes}


def test_a_salt_and_an_adapter_are_told_apart():
    assert shared(key(chat("x"), salt="ab", adapter="c"), key(chat("x"), salt="a", adapter="bc")) == 0


def test_image_key_depends_on_content_not_url_type():
    one = key(chat(picture(b"one image")))
    again = key(chat([{"type": "image_url", "image_url": {"url": image_url(b"one image", "image/jpeg")}}]))
    other = key(chat(picture(b"another image")))
    assert one.images == again.images
    assert one.images != other.images


def test_image_preparation_is_part_of_the_key():
    assert key(chat(picture(b"x", max_pixels=1000))).images != key(chat(picture(b"x", max_pixels=2000))).images
    whole = {**chat(picture(b"x")), "mm_processor_kwargs": {"max_tokens": 100}}
    assert key(chat(picture(b"x"))).images != key(whole).images
    assert key(whole).images != key({**whole, "mm_processor_kwargs": {"max_tokens": 200}}).images


@pytest.mark.parametrize(
    "body",
    [
        chat(picture(b"x")),
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": image_url(b"x")}]}]},
        {"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image_url(b"x")[22:]}}
        ]}]},
    ],
)  # fmt: skip
def test_every_api_has_its_images_found(body):
    assert key(body).images == key(chat(picture(b"x"))).images


def test_all_frames_of_a_video_count():
    frames = [image_url(bytes([n])) for n in range(3)]
    one = key(chat([{"type": "video", "video": frames}]))
    other = key(chat([{"type": "video", "video": [frames[0], frames[2], frames[1]]}]))
    assert len(one.images) == 1
    assert one.images != other.images


def test_a_conversation_is_found_by_its_id():
    one = key({"input": "next", "previous_response_id": "resp_1"})
    assert one.segments[0].digest == one.history("resp_1")
    assert one.follows == "resp_1"
    assert one.after(500).tokens == one.tokens + 500
    assert [home.tokens for home in one.after(500).homes] == [500]
    assert one.history("resp_1") != key({"input": "next"}, salt="tenant").history("resp_1")
    assert key({"input": "x", "conversation": {"id": "conv_1"}}).conversation == "conv_1"


def test_tools_and_instructions_come_first():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert shared(key(chat("x")), key(chat("x", tools=tools))) == 0
    assert shared(key({"input": "x", "instructions": "a"}), key({"input": "x", "instructions": "b"})) < 10


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=()), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from("role content type text image_url url data messages input".split()), inner)
    ),
    max_leaves=20,
)


@given(
    st.dictionaries(
        st.sampled_from("messages input prompt system tools conversation previous_response_id".split()), json
    )
)
def test_whatever_the_body_is_there_is_a_key(body):
    found = key(body)
    assert found == key(body)
    assert found.tokens == (found.segments[-1].tokens if found.segments else 0)
    assert len(found.segments) <= MAX_SEGMENTS + 1
    assert all(a.tokens <= b.tokens for a, b in zip(found.segments, found.segments[1:], strict=False))


def test_a_key_is_bounded():
    assert len(key(chat("x" * 10_000_000)).segments) == MAX_SEGMENTS


@pytest.mark.parametrize("options", [("PNG",), ("JPEG",), ("GIF",), ("WEBP",), ("WEBP", {"lossless": True})])
def test_sizes_come_from_the_file_header(options):
    kind, *more = options
    file = io.BytesIO()
    Image.new("RGB", (301, 203), "red").save(file, kind, **(more[0] if more else {}))
    assert size_of(file.getvalue()[:1024]) == (301, 203)


@given(
    st.binary(max_size=64), st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF1234WEBP"])
)
def test_a_broken_head_has_no_size_or_some(data, head):
    size = size_of(head + data)
    assert size is None or len(size) == 2


def test_tokens_are_estimated_from_texts_and_pixels():
    def tokens(*parts: object) -> int:
        return key({"messages": [{"role": "user", "content": list(parts)}]}).tokens

    def image(width: int, height: int) -> dict[str, object]:
        file = io.BytesIO()
        Image.new("RGB", (width, height), "red").save(file, "PNG")
        return picture(file.getvalue())[0]

    text = {"type": "text", "text": "x" * 40}
    assert tokens(text) == tokens() + 11
    assert [tokens(text, image(*size)) - tokens(text) for size in ((560, 280), (28, 28))] == [200, 64]
    assert tokens(text, {"type": "image_url", "image_url": {"url": "https://host/x"}}) == tokens(text) + 512
