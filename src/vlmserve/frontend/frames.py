"""Replaces videos by images of their frames, for models that take only images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlmserve.errors import InvalidRequestError, VideoTooLargeError
from vlmserve.frontend.messages import Medium, replace_media
from vlmserve.media.cache import ImageCache
from vlmserve.media.frame_forms import FrameForm
from vlmserve.media.processor import ImageProcessor
from vlmserve.media.sources import source_name
from vlmserve.media.usual_sizes import UsualSizes
from vlmserve.media.video_frames import FrameReader, FrameSequence
from vlmserve.media.videos import read_video
from vlmserve.prompt.template import ImagePart, Message, Part
from vlmserve.settings.config import MediaConfig

_WORDS = 16
"""Maximum tokens of the text before a frame."""


@dataclass(frozen=True)
class FrameLimits:
    max_prompt_len: int | None = None
    """In tokens."""
    usual: UsualSizes | None = None
    """Frame sizes by cost."""


@dataclass(frozen=True)
class VideosAsImages:
    form: FrameForm
    processor: ImageProcessor
    """Image processor of frames."""
    limits: MediaConfig
    cache: ImageCache

    def show(
        self, messages: Sequence[Message], media: Sequence[Medium], reader: FrameReader, limits: FrameLimits
    ) -> tuple[list[Message], list[Medium]]:
        """Replace videos by images of their frames. Only each video's first frame is decoded at once.

        media: all parts that are not text, in order. Raises VideoTooLargeError, and as `FrameReader` does.
        """
        count = sum(medium.kind == "video" for medium in media)

        def expand(video: Medium) -> tuple[list[Part], list[Medium]]:
            try:
                taken = self._taken(video, reader, limits, count)
            except InvalidRequestError as error:
                error.param = error.param or video.place
                error.source = error.source or source_name(video.source)
                raise
            *before, after = self.form.words(taken.seconds, taken.duration)
            parts: list[Part] = []
            for text in before:
                parts += [text, ImagePart(inline=True)]
            images = [replace(video, kind="image", source=frame) for frame in taken.frames]
            return [part for part in (*parts, after) if part], images

        return replace_media(messages, media, "video", expand)

    def _taken(self, video: Medium, reader: FrameReader, limits: FrameLimits, num_videos: int) -> FrameSequence:
        """Without fps in the request, the frames leave half of the prompt free."""
        processor = self.processor.within(replace(video.budget, low_detail=True))
        if isinstance(video.source, list | tuple):
            taken = reader.of_list(video.source, processor, video.fps or self.form.fps)
            return self._checked(taken, limits.max_prompt_len)
        data = read_video(video.source, self.limits)

        def take(most: int) -> FrameSequence:
            return reader.of_file(data, processor, lambda num, rate: self.form.sample(num, rate, video.fps, most))

        taken = take(self.limits.max_video_frames)
        if video.fps is not None:
            return self._checked(taken, limits.max_prompt_len)
        room = None if limits.max_prompt_len is None else limits.max_prompt_len // 2 // num_videos
        most = max(1, self._most(taken, room)[0])
        if limits.usual is not None:
            area = taken.frames[0].prepare(self.cache).pixels.size // 3
            most = int(min(most, limits.usual.max_groups(area)))
        return taken if len(taken.frames) <= most else take(most)

    def _checked(self, taken: FrameSequence, room: int | None) -> FrameSequence:
        most, tokens = self._most(taken, room)
        if len(taken.frames) > most:
            raise VideoTooLargeError(
                f"the video has {len(taken.frames):,} frames of {tokens:,} tokens each; {most:,} fit: "
                "lower its fps or max_tokens, or send fewer frames"
            )
        return taken

    def _most(self, taken: FrameSequence, room: int | None) -> tuple[int, int]:
        """Return how many frames like the first fit, and the tokens of one. room: in tokens; None: no limit."""
        first = taken.frames[0].prepare(self.cache)
        most = self.limits.max_video_pixels // max(first.pixels.size // 3, 1)
        return most if room is None else min(most, room // (first.num_tokens + _WORDS)), first.num_tokens
