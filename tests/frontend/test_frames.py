"""Videos for models that take only images: their frames, with text around them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tests.checkpoints import make_idefics3
from tests.engine.test_tiles import SMOLVLM_TEMPLATE
from tests.frontend.test_requests import data_url, user
from tests.media.images_for_tests import encoded, noise
from tests.media.test_videos import COLOURS, video_file
from tests.normalized import normalized
from tests.prompt.tokenizers_for_tests import LLAVA_STYLE, byte_level, write_checkpoint
from vlmserve.errors import InvalidRequestError, InvalidVideoError, VideoTooLargeError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.media.frame_forms import number
from vlmserve.settings.config import MediaConfig

FRAMES = [noise(40, 24, seed=seed) for seed in range(3)]
LISTED = {"type": "video", "video": [data_url(encoded(frame))["image_url"]["url"] for frame in FRAMES], "fps": 2}


def video_url(data: bytes, kind: str = "video/mp4", **fields: Any) -> dict[str, Any]:
    url = f"data:{kind};base64," + base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": url}, **fields}


def animation(count: int = 6) -> bytes:
    """A GIF with a frame of each colour, 5 a second."""
    file = io.BytesIO()
    first, *others = (Image.new("RGB", (40, 24), colour) for colour in COLOURS[:count])
    first.save(file, "GIF", save_all=True, append_images=others, duration=200)
    return file.getvalue()


@pytest.fixture(scope="module")
def film() -> bytes:
    """Six seconds, four frames each."""
    return video_file([colour for colour in COLOURS for _ in range(4)])


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llava"), byte_level())


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sampling = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 40}}
    folder = make_idefics3(
        tmp_path_factory.mktemp("smolvlm"), family="SmolVLM", image_processor={"video_sampling": sampling}
    )
    (folder / "chat_template.jinja").write_text(SMOLVLM_TEMPLATE)
    return folder


def right_colours(images: list[Any], mean: float, std: float) -> np.ndarray:
    """Of the right half of each image, from 0 to 255, roughly."""
    halves = [normalized(image)[..., image.pixels.shape[3] // 2 + 2 :] for image in images]
    return np.concatenate([(half.mean((2, 3)) * std + mean) * 255 for half in halves])


def test_smolvlm_prompt_and_pixels_equal_transformers(
    smolvlm: Path, film: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparer = RequestPreparer(smolvlm, MediaConfig())
    prompt = preparer.chat([user(video_url(film), "What moves?")])
    monkeypatch.setattr(processing_smolvlm, "num2words", number)
    frame = processing_smolvlm.get_image_prompt_string(0, 0, 4, "<fake_token_around_image>", "<image>", "<global-img>")
    video = "You are provided the following series of six frames from a 0:00:06 [H:MM:SS] video.\n"
    # Of 24 frames, 6 from the first to the last.
    video += "".join(f"\nFrame from 00:0{index // 4}:{frame}" for index in (0, 4, 9, 13, 18, 23)) + "\n\n"
    expected = f"<s>User: {video}What moves?<end_of_utterance>\nAssistant:"
    assert prompt.token_ids == preparer.tokenizer.encode(expected)
    assert len(prompt.images) == 6
    np.testing.assert_allclose(right_colours([one.image for one in prompt.images], 0.5, 0.5), COLOURS, atol=25)

    listed = preparer.chat([user(LISTED)])
    settings = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": False}
    theirs = SmolVLMImageProcessorPil(**settings)(images=FRAMES, return_tensors="np")["pixel_values"]
    for span, pixels in zip(listed.images, theirs[0], strict=True):
        np.testing.assert_allclose(normalized(span.image)[0], pixels, rtol=0, atol=1e-6)


def test_smolvlm_frame_size_may_differ_from_images(smolvlm: Path, tmp_path: Path) -> None:
    for file in smolvlm.iterdir():
        if file.suffix in (".json", ".jinja"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    names = json.loads((smolvlm / "processor_config.json").read_text())
    videos = {
        "video_processor_type": "SmolVLMVideoProcessor",
        "num_frames": 2,
        "size": {"longest_edge": 22},
        "max_image_size": {"longest_edge": 16},
    }
    (tmp_path / "processor_config.json").write_text(json.dumps({**names, "video_processor": videos}))
    settings = {**videos, "do_image_splitting": False}
    theirs = SmolVLMImageProcessorPil(**settings)(images=FRAMES, return_tensors="np")["pixel_values"]
    preparer = RequestPreparer(tmp_path, MediaConfig())
    for span, pixels in zip(preparer.chat([user(LISTED)]).images, theirs[0], strict=True):
        np.testing.assert_allclose(normalized(span.image)[0], pixels, rtol=0, atol=1e-6)
    assert len(preparer.chat([user(video_url(video_file(COLOURS)))]).images) == 2


def test_times_stay_at_frames_in_images_first_templates(llava: Path, film: bytes) -> None:
    preparer = RequestPreparer(llava, MediaConfig(), chat_template=LLAVA_STYLE)
    prompt = preparer.chat([user("See", video_url(film, fps=0.5), data_url(encoded(noise(9, 9))), "So?")])
    text = preparer.prompt_text(prompt)
    shown = "Frame at 0.0 s:  <image> \nFrame at 3.0 s:  <image> \nFrame at 5.8 s:  <image> \n So?"
    assert text.startswith("<s>USER: <image>\nSee ")
    assert shown in text
    kept = RequestPreparer(llava, MediaConfig())
    text = kept.prompt_text(kept.chat([user("See", LISTED, "So?")]))
    assert "SeeFrame at 0.0 s: <image>\nFrame at 0.5 s: <image>\nFrame at 1.0 s: <image>\nSo?" in text
    text = kept.prompt_text(kept.chat([user({"type": "video", "video": LISTED["video"]})]))
    assert "Frame at 0.0 s: <image>\nFrame at 1.0 s: <image>\nFrame at 2.0 s: <image>" in text


def test_frames_are_images_that_are_prepared_once(llava: Path, film: bytes) -> None:
    preparer = RequestPreparer(llava, MediaConfig())
    keys = [span.image.key for span in preparer.chat([user(LISTED)]).images]
    images = [span.image.key for span in preparer.chat([user(*map(data_url, map(encoded, FRAMES)))]).images]
    assert keys == images
    first = preparer.chat([user(video_url(film))])
    misses = preparer.media.image_cache.stats().misses
    again = preparer.chat([user(video_url(film), "Once more?")])
    part = preparer.chat([user(video_url(film, fps=0.5))])
    assert preparer.media.image_cache.stats().misses == misses + 1, "one of three frames was not among the six"
    own, others = ([span.image.key for span in prompt.images] for prompt in (first, again))
    assert own == others
    assert len(set(own)) == 6 == len(part.images) + 3
    salted = preparer.chat([user(video_url(film))], cache_salt="tenant")
    assert not set(own) & {span.image.key for span in salted.images}


def test_requested_frames_are_used_despite_cached_ones(llava: Path, film: bytes) -> None:
    """Frames are decoded in order, and those that are known are passed."""
    expected = RequestPreparer(llava, MediaConfig()).chat([user(video_url(film))])
    preparer = RequestPreparer(llava, MediaConfig())
    preparer.chat([user(video_url(film, fps=0.5))])
    twice = preparer.chat([user(video_url(film), video_url(film), video_url(film, fps=1))])
    for index, span in enumerate(twice.images):
        assert np.array_equal(span.image.pixels, expected.images[index % 6].image.pixels)
    colours = right_colours([span.image for span in expected.images], 0.45, 0.27)
    np.testing.assert_allclose(colours, COLOURS, atol=40)


def test_an_animation_is_a_video_too(llava: Path) -> None:
    pytest.importorskip("av")
    preparer = RequestPreparer(llava, MediaConfig())
    prompt = preparer.chat([user(video_url(animation(), "image/gif", fps=5))])
    colours = right_colours([span.image for span in prompt.images], 0.45, 0.27)
    np.testing.assert_allclose(colours, COLOURS, atol=40)
    assert "Frame at 0.2 s:" in preparer.prompt_text(prompt)


def test_no_more_frames_are_shown_than_fit(llava: Path, film: bytes) -> None:
    preparer = RequestPreparer(llava, MediaConfig())
    [image] = preparer.chat([user(data_url(encoded(noise(9, 9))))]).images
    preparer.max_prompt_len = 6 * (image.image.num_tokens + 16)
    assert len(preparer.chat([user(video_url(film))]).images) == 3, "half of the prompt"
    assert len(preparer.chat([user(video_url(film), video_url(film))]).images) == 2
    assert len(preparer.chat([user(video_url(film, fps=1))]).images) == 6
    message = f"24 frames of {image.image.num_tokens} tokens each; 6 fit: lower its fps"
    with pytest.raises(VideoTooLargeError, match=message) as caught:
        preparer.chat([user(video_url(film, fps=4))])
    assert caught.value.param == "messages[0].content[0].video_url.url"
    with pytest.raises(VideoTooLargeError, match=r"9 frames.*6 fit"):
        preparer.chat([user({**LISTED, "video": LISTED["video"] * 3})])
    few = RequestPreparer(llava, MediaConfig(max_video_frames=2))
    assert len(few.chat([user(video_url(film, fps=4))]).images) == 2
    with pytest.raises(VideoTooLargeError, match="3 frames; at most 2"):
        few.chat([user(LISTED)])
    small = RequestPreparer(llava, MediaConfig(max_video_pixels=5 * image.image.pixels.size // 3))
    assert len(small.chat([user(video_url(film))]).images) == 5


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (video_url(b"no video at all"), "not a video in a supported format"),
        (video_url(bytes(4) + b"ftypisom" + bytes(50)), "broken|frames"),
        (video_url(encoded(noise(9, 9)), "image/png"), "not a video in a supported format"),
        ({**LISTED, "max_tokens": 1}, "max_tokens is 1, but for this model an image has at least"),
    ],
)
def test_non_video_is_rejected_at_its_place(llava: Path, part: dict[str, Any], message: str) -> None:
    pytest.importorskip("av")
    with pytest.raises(InvalidRequestError, match=message) as caught:
        RequestPreparer(llava, MediaConfig()).chat([user("See", part)])
    assert str(caught.value.param).startswith("messages[0].content[1].video")


def test_a_file_that_breaks_off_is_refused(llava: Path, film: bytes) -> None:
    start = film.index(b"mdat") + 4
    broken = film[:start] + bytes(len(film) // 2) + film[start + len(film) // 2 :]
    preparer = RequestPreparer(llava, MediaConfig())
    with pytest.raises(InvalidVideoError, match="broken"):
        preparer.chat([user(video_url(broken))])
    assert len(preparer.chat([user(video_url(film))]).images) == 6


def test_a_text_has_no_places_for_frames(llava: Path) -> None:
    preparer = RequestPreparer(llava, MediaConfig())
    with pytest.raises(InvalidRequestError, match="sees a video as images of its frames") as caught:
        preparer.text("See", videos=[FRAMES], allow_local=True)
    assert caught.value.param == "videos"
