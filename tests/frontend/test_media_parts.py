"""Parts of messages that are images with limits, or videos."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_idefics3, make_qwen_vl
from tests.frontend.test_requests import TINY, data_url, user
from tests.media.images_for_tests import encoded, noise
from tests.media.test_videos import COLOURS, video_file
from tests.prompt.tokenizers_for_tests import byte_level, write_checkpoint
from vlmserve.errors import ConfigurationError, InvalidRequestError, TooManyImagesError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import MediaConfig, ProcessorOverrides

FRAME = data_url(encoded(noise(40, 24)))["image_url"]["url"]
VIDEO = {"type": "video", "video": [FRAME, FRAME, FRAME]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen_vl(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def preparer(folder: Path) -> RequestPreparer:
    return RequestPreparer(folder, MediaConfig())


def test_images_and_videos_stand_where_they_were_put(preparer: RequestPreparer) -> None:
    prompt = preparer.chat([user(VIDEO, "and", data_url(encoded(noise(60, 60))), VIDEO)])
    tokenizer = preparer.tokenizer
    kinds = [tokenizer.token(prompt.token_ids[span.start]) for span in prompt.images]
    assert kinds == ["<|video_pad|>", "<|image_pad|>", "<|video_pad|>"]
    for span in prompt.images:
        start, end = tokenizer.token_id("<|vision_start|>"), tokenizer.token_id("<|vision_end|>")
        assert prompt.token_ids[span.start - 1] == start
        assert prompt.token_ids[span.end] == end
        assert len(set(prompt.token_ids[span.start : span.end])) == 1
    assert prompt.images[0].image.key == prompt.images[2].image.key


def test_uuid_of_an_image_names_no_other_image(preparer: RequestPreparer) -> None:
    first, second = (data_url(encoded(noise(60, 60, seed=seed))) for seed in (1, 2))
    prompt = preparer.chat([user({**first, "uuid": "same"}, {**second, "uuid": "same"}, {**first, "uuid": "other"})])
    keys = [span.image.key for span in prompt.images]
    assert keys[0] == keys[2] != keys[1]


def test_file_is_a_url_or_a_local_path(preparer: RequestPreparer, tmp_path: Path) -> None:
    data = video_file(COLOURS)
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    path = tmp_path / "film.mp4"
    path.write_bytes(data)
    remote = [{"type": "video_url", "video_url": {"url": url}}, {"type": "video_url", "video_url": url}]
    local = [{"type": "video", "video": source} for source in (path, str(path), data)]
    keys = {preparer.chat([user(part)]).images[0].image.key for part in remote}
    keys |= {preparer.chat([user(part)], allow_local=True).images[0].image.key for part in local}
    assert len(keys) == 1
    for part in local:
        with pytest.raises(InvalidRequestError, match="must be a list of the URLs of frames"):
            preparer.chat([user(part)])


def test_words_resembling_a_video_stay_words(preparer: RequestPreparer) -> None:
    text = "<|video_pad|><|image_pad|><|vision_start|>"
    prompt = preparer.chat([user(text, VIDEO)])
    assert len(prompt.images) == 1
    assert text in preparer.tokenizer.decode(prompt.token_ids)


@pytest.mark.parametrize(
    ("part", "param", "message"),
    [
        ({**TINY, "max_pixels": 0}, "messages[0].content[0].max_pixels", "positive whole number"),
        ({**TINY, "min_pixels": "9"}, "messages[0].content[0].min_pixels", "positive whole number"),
        ({**TINY, "min_pixels": True}, "messages[0].content[0].min_pixels", "positive whole number"),
        ({**TINY, "max_pixels": 10**9}, "messages[0].content[0].image_url.url", "this server's max_pixels, 2,304"),
        ({**VIDEO, "fps": 0}, "messages[0].content[0].fps", "more than 0"),
        ({**VIDEO, "fps": float("nan")}, "messages[0].content[0].fps", "more than 0"),
        ({**VIDEO, "max_pixels": 10**9}, "messages[0].content[0].video", "this server's max_pixels"),
        ({"type": "video", "video": []}, "messages[0].content[0].video", "list"),
        ({"type": "video"}, "messages[0].content[0].video", "list"),
        ({"type": "video", "video": [FRAME, "/etc/passwd"]}, "messages[0].content[0].video[1]", "must be a URL"),
        ({"type": "video_url", "video_url": {"url": "/etc/passwd"}}, "messages[0].content[0].video_url.url", "URL"),
    ],
)
def test_a_refusal_names_the_place(preparer: RequestPreparer, part: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        preparer.chat([user(part)])
    assert caught.value.param == param


def test_too_many_videos_are_rejected_before_reading(folder: Path) -> None:
    preparer = RequestPreparer(folder, MediaConfig(max_videos=1))
    broken = {"type": "video", "video": ["data:image/png;base64,AAAA"]}
    with pytest.raises(TooManyImagesError, match="2 videos; at most 1"):
        preparer.chat([user(broken, broken)])


def test_fixed_size_models_take_no_limits(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, byte_level())
    preparer = RequestPreparer(folder, MediaConfig())
    with pytest.raises(InvalidRequestError, match="for this model an image has at least 784 pixels"):
        preparer.chat([user({**TINY, "max_pixels": 500})])
    with pytest.raises(ConfigurationError, match="--mm-processor-kwargs: max_pixels is 500"):
        RequestPreparer(folder, MediaConfig(mm_processor_kwargs=ProcessorOverrides(max_pixels=500)))


def test_a_plain_text_has_no_place_for_videos(preparer: RequestPreparer) -> None:
    with pytest.raises(InvalidRequestError, match="1 placeholder for videos, but 0 videos"):
        preparer.text("<|vision_start|><|video_pad|><|vision_end|>")


IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 32 * 32},
}
VIDEOS = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 24 * 24}}


@pytest.mark.parametrize(
    ("files", "tokens"),
    [
        ({"preprocessor_config": IMAGES}, (16, 16)),
        ({"preprocessor_config": IMAGES, "video_preprocessor_config": VIDEOS}, (16, 9)),
        ({"processor_config": {"image_processor": IMAGES, "video_processor": VIDEOS}}, (16, 9)),
    ],
    ids=["one file", "two files", "transformers 5"],
)
def test_settings_are_read_from_all_transformers_locations(
    folder: Path, tmp_path: Path, files: dict[str, Any], tokens: tuple[int, int]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "preprocessor_config.json").unlink()
    for name, content in files.items():
        (copy / f"{name}.json").write_text(json.dumps(content))
    large = data_url(encoded(noise(200, 200)))
    video = {"type": "video", "video": [large["image_url"]["url"]]}
    prompt = RequestPreparer(copy, MediaConfig()).chat([user(large, video)])
    assert tuple(span.image.num_tokens for span in prompt.images) == tokens


def test_overrides_are_json_or_a_readable_error() -> None:
    for value in ('{"max_pixels": 900, "fps": 1}', {"max_pixels": 900, "fps": 1}):
        settings = read_settings(MediaConfig, {"mm_processor_kwargs": value})
        assert settings.mm_processor_kwargs == ProcessorOverrides(max_pixels=900, fps=1)
    for value, message in {"{": "not JSON", '{"pixels": 9}': "pixels", '{"max_pixels": 0}': "at least 1"}.items():
        with pytest.raises(ConfigurationError, match=message):
            read_settings(MediaConfig, {"mm_processor_kwargs": value})


def sizes(preparer: RequestPreparer, *parts: Any, **fields: Any) -> list[tuple[int | None, int | None, int]]:
    found = preparer.chat([user(*parts)], **fields).image_sizes
    return [(size.model_width, size.model_height, size.tokens) for size in found]


def test_no_request_exceeds_the_server_budget(folder: Path, tmp_path: Path) -> None:
    image = data_url(encoded(noise(90, 40)))
    narrow = RequestPreparer(folder, MediaConfig(mm_processor_kwargs=ProcessorOverrides(max_tokens=10)))
    for budget in ({}, {"max_tokens": 30}):
        assert sizes(narrow, {**image, **budget}) == [(32, 16, 8)]
    assert sizes(narrow, {**image, "max_tokens": 2}, mm_processor_kwargs={"max_tokens": 9}) == [(16, 8, 2)]
    with pytest.raises(InvalidRequestError, match=r"max_tokens is 10, but .* takes at least 14 tokens"):
        sizes(narrow, data_url(encoded(noise(600, 30))))
    tiles = make_idefics3(tmp_path)
    own, fewer = (
        RequestPreparer(tiles, MediaConfig(mm_processor_kwargs=ProcessorOverrides(max_tokens=most)))
        for most in (None, 40)
    )
    assert sizes(own, image)[0][2] > 40 >= sizes(fewer, image)[0][2]
    assert sizes(own, image, mm_processor_kwargs={"max_tokens": 40}) == sizes(fewer, image)
    with pytest.raises(ConfigurationError, match="--mm-processor-kwargs: max_tokens is 1, but for this model an image"):
        RequestPreparer(tiles, MediaConfig(mm_processor_kwargs=ProcessorOverrides(max_tokens=1)))


def test_a_video_has_a_budget_for_each_frame(preparer: RequestPreparer) -> None:
    [own] = preparer.chat([user(VIDEO)]).image_sizes
    [small] = preparer.chat([user({**VIDEO, "max_tokens": 4})]).image_sizes
    assert (own.width, own.height, own.frames, small.frames) == (40, 24, 3, 3)
    assert small.tokens <= 2 * 4 < own.tokens
    fields = {"max_tokens": 4, "fps": 0.5}
    prompts = [
        preparer.chat([user(part)], mm_processor_kwargs=kwargs)
        for part, kwargs in ((VIDEO, fields), ({**VIDEO, **fields}, {"fps": 2}))
    ]
    assert prompts[0].images[0].image.key == prompts[1].images[0].image.key
    assert prompts[0].image_sizes == [small]
