"""Which frames of a video a model without videos is shown, and the words around them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import VideoMetadata

from vlmserve.media.frame_forms import AdjacentFrames, ClockedFrames, SmolVLMFrames, TimedFrames, number


@pytest.mark.parametrize("num_frames", [1, 2, 7, 25, 99, 250, 3000])
@pytest.mark.parametrize("rate", [1.0, 23.976, 30.0])
def test_frames_of_smolvlm_are_those_that_transformers_takes(num_frames: int, rate: float) -> None:
    own: Any = SimpleNamespace(num_frames=64, fps=1)
    metadata = VideoMetadata(total_num_frames=num_frames, fps=rate, duration=num_frames / rate)
    form = SmolVLMFrames(1.0, 64)
    for fps in (None, 0.3, 2.0):
        for most in (3, 64):
            expected = SmolVLMVideoProcessor.sample_frames(own, metadata, num_frames=most, fps=fps).tolist()
            assert form.sample(num_frames, rate, fps, most) == expected
    assert form.sample(num_frames, rate, 2.0, 768) == form.sample(num_frames, rate, 2.0, 64)


def test_words_of_smolvlm_are_those_that_transformers_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    # It reads numbers from a package that need not be installed; theirs are tested below.
    monkeypatch.setattr(processing_smolvlm, "num2words", number)
    own: Any = SimpleNamespace(image_seq_len=2, image_token="#", fake_image_token="@", global_image_token="W")
    for indices, rate, duration in (([0], 2.0, 0.5), ([0, 30, 61], 23.976, 4.2), ([3, 90, 9000], 1.5, 6001.9)):
        metadata = VideoMetadata(total_num_frames=9, fps=rate, duration=duration, frames_indices=indices)
        inputs = {"pixel_values": np.zeros((1, len(indices))), "video_metadata": [metadata]}
        expected = SmolVLMProcessor.replace_video_token(own, inputs, 0)
        words = SmolVLMFrames(1.0, 64).words([index / rate for index in indices], duration)
        assert "@W##@".join(words) == expected


def test_numbers_are_written_as_num2words_writes_them() -> None:
    written = {
        1: "one", 12: "twelve", 20: "twenty", 21: "twenty-one", 64: "sixty-four", 99: "ninety-nine",
        100: "one hundred", 101: "one hundred and one", 342: "three hundred and forty-two",
        768: "seven hundred and sixty-eight", 1000: "1000",
    }  # fmt: skip
    assert {value: number(value) for value in written} == written


def test_smolvlm_settings_are_read_from_all_transformers_locations() -> None:
    older = {"video_sampling": {"fps": 2, "max_frames": 32, "video_size": {"longest_edge": 2048}}}
    newer = {"video_processor_type": "SmolVLMVideoProcessor", "fps": 2, "num_frames": 32}
    for settings in (older, newer):
        assert SmolVLMFrames.from_settings(settings, None) == SmolVLMFrames(2.0, 32)
        assert SmolVLMFrames.from_settings(settings, 0.5) == SmolVLMFrames(0.5, 32)
    assert SmolVLMFrames.from_settings({"size": {"longest_edge": 2048}}, None) is None


@pytest.mark.parametrize(
    ("form", "num_frames", "fps", "most", "expected"),
    [
        (TimedFrames(), 40, None, 768, [0, 13, 26, 39]),
        (TimedFrames(), 600, None, 768, list(np.linspace(0, 599, 16).round())),
        (TimedFrames(), 600, None, 3, [0, 300, 599]),
        (TimedFrames(), 40, 0.5, 768, [0, 39]),
        (TimedFrames(), 40, 0.1, 768, [0]),
        (TimedFrames(0.5), 40, None, 768, [0, 39]),
        (TimedFrames(0.5), 40, 1.0, 768, [0, 13, 26, 39]),
        (TimedFrames(10.0), 600, None, 768, list(range(600))),
        (TimedFrames(), 2, None, 768, [0, 1]),
    ],
)
def test_few_frames_are_the_default(
    form: TimedFrames, num_frames: int, fps: float | None, most: int, expected: list[int]
) -> None:
    assert form.sample(num_frames, 10.0, fps, most) == expected


def test_frame_lists_have_the_servers_rate() -> None:
    for own, rate in ((None, 1.0), (0.5, 0.5)):
        assert TimedFrames(own).fps == ClockedFrames.from_settings({}, own).fps == rate


def test_times_stand_before_frames() -> None:
    assert "#".join(TimedFrames().words([0.0, 1.25], 2.0)) == "Frame at 0.0 s: #\nFrame at 1.2 s: #\n"


@pytest.mark.parametrize("num_frames", [1, 2, 75, 76, 300, 5000])
@pytest.mark.parametrize("rate", [0.5, 23.976, 25.0])
def test_frames_of_minicpmv_are_those_that_transformers_takes(num_frames: int, rate: float) -> None:
    metadata = VideoMetadata(total_num_frames=num_frames, fps=rate, duration=num_frames / rate)
    form = AdjacentFrames.from_settings({"max_num_frames": 20}, None)
    own: Any = SimpleNamespace()
    expected = MiniCPMV4_6VideoProcessor.sample_frames(own, metadata, max_num_frames=20, stack_frames=1)
    assert form.sample(num_frames, rate, None, 768) == expected
    assert len(form.sample(num_frames, rate, 3.0, 3)) <= 3


@pytest.mark.parametrize("num_frames", [32, 33, 100, 3000])
@pytest.mark.parametrize("rate", [0.5, 23.976, 25.0])
def test_frames_of_gemma_are_those_that_transformers_takes(num_frames: int, rate: float) -> None:
    own: Any = SimpleNamespace(num_frames=32, fps=None)
    metadata = VideoMetadata(total_num_frames=num_frames, fps=rate, duration=num_frames / rate)
    form = ClockedFrames.from_settings({}, None)
    expected = BaseVideoProcessor.sample_frames(own, metadata).tolist()
    assert form.sample(num_frames, rate, None, 768) == expected
    assert form.sample(5, rate, None, 768) == [0, 1, 2, 3, 4]
    assert len(form.sample(num_frames, rate, 1.0, 7)) <= 7
    asked = BaseVideoProcessor.sample_frames(SimpleNamespace(num_frames=None, fps=0.4), metadata).tolist()
    assert form.sample(num_frames, rate, 0.4, 10_000) == asked


def test_words_of_gemma_are_those_that_transformers_writes() -> None:
    own: Any = SimpleNamespace(boi_token="<", eoi_token=">", video_token="#")
    for indices, rate in (([0], 2.0), ([0, 30, 61], 23.976), ([3, 90, 9000], 1.5)):
        metadata = VideoMetadata(total_num_frames=9000, fps=rate, frames_indices=indices)
        inputs = {"num_soft_tokens_per_video": [2], "video_metadata": [metadata]}
        expected = Gemma4Processor.replace_video_token(own, inputs, 0)
        words = ClockedFrames.from_settings({}, None).words([index / rate for index in indices], 9.0)
        assert "<##>".join(words) == expected
