"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL from a checkpoint's files, through `LLM` and the server, against transformers'
processor and models: images of any shape, videos, limits that requests set."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
from transformers.processing_utils import ProcessorMixin

from tests.at_once import chat_at_once
from tests.checkpoints import QWEN3_VIDEO_PIXELS, QWEN_CLASSES, QWEN_PIXELS, QWEN_TEMPLATE, make_qwen_vl
from tests.media.images_for_tests import encoded, noise
from tests.models.test_qwen_vision import patches
from tests.normalized import normalized
from tests.oracles.mrope import positions
from tests.server.live import LiveServer
from vlmserve import LLM, RequestOutput, SamplingParams
from vlmserve.errors import PromptTooLongError
from vlmserve.tools.verify import record_logits

NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
IMAGES = [noise(40, 30), noise(20, 60, seed=1), noise(90, 50, seed=2), noise(9, 9, seed=3)]
FRAMES = [noise(40, 24, seed=seed) for seed in range(10, 23)]


def user(*parts: Any, **limits: Any) -> dict[str, Any]:
    """Texts, images, and videos as lists of frames; limits: of all that is seen."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif isinstance(part, list):
            content.append({"type": "video", "video": part, **limits})
        else:
            content.append({"type": "image", "image": part, **limits})
    return {"role": "user", "content": content}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@dataclass
class Oracle:
    """A checkpoint and transformers' opinion of it."""

    kind: str
    folder: Path
    model: nn.Module
    processor: Any

    def llm(self, **settings: Any) -> LLM:
        settings = {"kv_cache_memory": "16MiB", "dtype": "float32", "device": "cpu", "block_size": 4, **settings}
        return LLM(str(self.folder), **settings)

    def images(self, images: Sequence[Image.Image], **limits: int) -> Any:
        """What transformers' image processor makes of them."""
        return self.processor.image_processor(images=list(images), return_tensors="pt", **limits)

    def inputs(self, conversation: Sequence[dict[str, Any]], **limits: int) -> dict[str, torch.Tensor]:
        """What transformers' processor makes of a conversation without videos."""
        text = self.processor.apply_chat_template(list(conversation), add_generation_prompt=True, tokenize=False)
        parts = [
            part for message in conversation if isinstance(message["content"], list) for part in message["content"]
        ]
        images = [part["image"] for part in parts if part["type"] == "image"]
        return dict(self.processor(text=text, images=images or None, return_tensors="pt", **limits))

    @torch.inference_mode()
    def greedy(self, conversation: Sequence[dict[str, Any]], **limits: int) -> list[int]:
        inputs = self.inputs(conversation, **limits)
        generated = self.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        return generated[0, inputs["input_ids"].shape[1] :].tolist()

    def video(self, frames: Sequence[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
        """Patches and grid of a video: of each two frames the first and the second half of what the image processor
        makes of them, which shows an image twice."""
        resize = self.kind != "qwen3_vl"
        if not resize:
            width, height = frames[0].size
            rows, columns = smart_resize(len(frames), height, width, 2, 8, *QWEN3_VIDEO_PIXELS.values())
            frames = [frame.resize((columns, rows), Image.Resampling.BICUBIC) for frame in frames]
        frames = [*frames, frames[-1]] if len(frames) % 2 else list(frames)
        made = [self.images([frame], do_resize=resize) for frame in frames]
        rows = [one["pixel_values"].view(len(one["pixel_values"]), 3, 2, -1) for one in made]
        pairs = [torch.stack((a[:, :, 0], b[:, :, 1]), 2) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        grid = made[0]["image_grid_thw"].clone()
        grid[0, 0] = len(pairs)
        return torch.cat(pairs).flatten(1), grid

    def text_of_videos(self, text: str, videos: Sequence[Sequence[Image.Image]], fps: float) -> str:
        """A prompt in which videos are written as transformers' processor of Qwen3-VL writes them, in place of the
        placeholder and the tokens around it."""
        own: Any = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
        own.vision_start_token, own.video_token, own.vision_end_token = (
            f"<|{name}|>" for name in ("vision_start", "video_pad", "vision_end")
        )
        own.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
        for frames in videos:
            metadata = SimpleNamespace(fps=fps, frames_indices=list(range(len(frames))))
            inputs = {"video_grid_thw": self.video(frames)[1], "video_metadata": [metadata]}
            written = own.replace_video_token(inputs, 0).replace("<|video_pad|>", "<|of_video|>")
            text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", written, 1)
        return text.replace("<|of_video|>", "<|video_pad|>")

    def with_videos(
        self, conversation: list[dict[str, Any]], images: Sequence[Image.Image], videos: Any, fps: float
    ) -> list[int]:
        """Token ids of a prompt of Qwen3-VL. The sizes of images are what the image processor says."""
        text = self.processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        for image in images:
            count = int(self.images([image])["image_grid_thw"].prod()) // 4
            text = text.replace("<|image_pad|>", "<|of_image|>" * count, 1)
        text = self.text_of_videos(text, videos, fps).replace("<|of_image|>", "<|image_pad|>")
        return list(self.processor.tokenizer(text)["input_ids"])

    @torch.inference_mode()
    def greedy_with_videos(
        self,
        token_ids: list[int],
        images: Sequence[Image.Image],
        videos: Sequence[Sequence[Image.Image]],
        order: str,
        fps: float = 2.0,
        guess: Sequence[int] = (),
    ) -> list[int]:
        """order: "v" for a video and "p" for an image, as they come in the prompt. guess: an answer that need not be
        right. One pass over all of it tells, which is faster than to find it."""
        config = self.model.config
        made = [self.video(frames) for frames in videos]
        inputs: dict[str, Any] = {
            "pixel_values_videos": torch.cat([rows for rows, _ in made]),
            "video_grid_thw": torch.cat([grid for _, grid in made]),
        }
        if images:
            inputs |= dict(self.images(images))
        step = 2 / fps * config.vision_config.tokens_per_second if self.kind == "qwen2_5_vl" else 1.0
        videos_left = [tuple(grid) for grid in inputs["video_grid_thw"].tolist()]
        grids_left = [tuple(grid) for grid in inputs["image_grid_thw"].tolist()] if images else []
        grids = []
        for kind in order:
            frames, rows, columns = (videos_left if kind == "v" else grids_left).pop(0)
            if self.kind == "qwen3_vl":
                grids += [((1, rows // 2, columns // 2), 1.0)] * frames
            else:
                grids.append(((frames, rows // 2, columns // 2), step if kind == "v" else 1.0))
        places = {config.image_token_id, config.video_token_id}

        def likeliest(answer: list[int]) -> list[int]:
            """After the prompt and after each token of the answer."""
            ids = torch.tensor([token_ids + answer])
            logits = self.model(
                input_ids=ids, position_ids=positions(ids[0].tolist(), places, grids), use_cache=False, **inputs
            ).logits
            found: list[int] = logits[0, len(token_ids) - 1 :].argmax(-1).tolist()
            return found

        if len(guess) == NEW_TOKENS and likeliest(list(guess[:-1])) == list(guess):
            return list(guess)
        answer: list[int] = []
        for _ in range(NEW_TOKENS):
            answer.append(likeliest(answer)[-1])
        return answer


@pytest.fixture(scope="module", params=QWEN_CLASSES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = make_qwen_vl(tmp_path_factory.mktemp(request.param), request.param)
    model = QWEN_CLASSES[request.param][1].from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    with pytest.MonkeyPatch.context() as patch:
        # Which classes fit is only known where torchvision is, which videos would need.
        patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
        processor = Qwen2VLProcessor(
            Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, **QWEN_PIXELS),
            PreTrainedTokenizerFast.from_pretrained(folder),
            chat_template=QWEN_TEMPLATE,
        )
    return Oracle(request.param, folder, model, processor)


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [user(IMAGES[0], "What is in the picture?")],
    [user("Hi"), assistant("Hello world"), user("First", IMAGES[1], "then", IMAGES[2], "?")],
    [user(IMAGES[3], IMAGES[0], IMAGES[1])],
    [user("How many green triangles are there?")],
    [user(IMAGES[2]), assistant("A number"), user("And now?")],
]


def tokens(results: Sequence[RequestOutput]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[list[int]]:
    return [oracle.greedy(conversation) for conversation in CONVERSATIONS]


def test_ids_pixels_and_grids_equal_the_processor(oracle: Oracle) -> None:
    preparer = oracle.llm(load="lazy").preparer
    for conversation in CONVERSATIONS:
        prompt, theirs = preparer.chat(conversation, allow_local=True), oracle.inputs(conversation)
        assert prompt.token_ids == theirs["input_ids"][0].tolist()
        if not prompt.images:
            continue
        grids = [span.image.grid for span in prompt.images]
        assert grids == [(t, h // 2, w // 2) for t, h, w in theirs["image_grid_thw"].tolist()]
        areas = [span.image.pixels[0, 0].size for span in prompt.images]
        assert all(QWEN_PIXELS["min_pixels"] <= area <= QWEN_PIXELS["max_pixels"] for area in areas)
        vision = oracle.model.config.vision_config
        rows = torch.cat([_patches(normalized(span.image), vision) for span in prompt.images])
        torch.testing.assert_close(rows, theirs["pixel_values"], atol=1e-5, rtol=0)


def _patches(pixels: np.ndarray, config: Any) -> torch.Tensor:
    return patches(torch.tensor(pixels), config)[0]


# Kernels are compared with torch's in test_qwen_vl.
@pytest.mark.parametrize("budget", [9, 2048])
def test_answers_are_those_of_transformers(oracle: Oracle, expected: list[list[int]], budget: int) -> None:
    assert len({tuple(answer) for answer in expected}) == len(expected), "answers that are alike would prove little"
    llm = oracle.llm(max_num_batched_tokens=budget)
    assert tokens(llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)) == expected
    again = llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
    assert tokens(again) == expected
    assert all(result.num_cached_tokens > 0 and result.num_images_encoded == 0 for result in again)


def test_limits_are_those_of_the_processor(oracle: Oracle) -> None:
    llm = oracle.llm()
    image = IMAGES[2]
    wide, narrow = [user(image, "What?")], [user(image, "What?", max_pixels=600)]
    grown = [user(IMAGES[3], "What?", min_pixels=2000)]
    results = llm.chat([wide, narrow, wide, grown], GREEDY, use_tqdm=False)
    lengths = [len(result.prompt_token_ids) for result in results]
    assert lengths[0] == lengths[2] > lengths[1]
    size = {"shortest_edge": QWEN_PIXELS["min_pixels"], "longest_edge": QWEN_PIXELS["max_pixels"]}
    assert tokens(results) == [
        oracle.greedy(wide),
        oracle.greedy(narrow, size={**size, "longest_edge": 600}),
        oracle.greedy(wide),
        oracle.greedy(grown, size={**size, "shortest_edge": 2000}),
    ]
    keys = {llm.preparer.chat(asked, allow_local=True).images[0].image.key for asked in (wide, narrow)}
    assert len(keys) == 2, "pixels of other bounds need other keys"
    bounded = oracle.llm(mm_processor_kwargs={"max_pixels": 600})
    assert tokens(bounded.chat(wide, GREEDY, use_tqdm=False)) == [
        oracle.greedy(narrow, size={**size, "longest_edge": 600})
    ]


def test_image_budgets_share_no_cache(oracle: Oracle) -> None:
    """Even if they come to the same pixels: what is before the image is all that they share."""
    llm, image = oracle.llm(), IMAGES[2]
    asked = [[user("Look at this: ", image, "What?", max_tokens=most)] for most in (10, 11, 10)]
    results = [llm.chat(one, GREEDY, use_tqdm=False)[0] for one in asked]
    start = llm.preparer.chat(asked[0], allow_local=True).images[0].start
    assert results[0].prompt_token_ids == results[1].prompt_token_ids
    assert [result.num_images_encoded for result in results] == [1, 1, 0]
    assert 0 < results[1].num_cached_tokens <= start < results[2].num_cached_tokens


VIDEOS: list[tuple[list[dict[str, Any]], str, list[Image.Image], list[list[Image.Image]], float]] = [
    ([user(FRAMES[:4], "What is in it?")], "v", [], [FRAMES[:4]], 2.0),
    ([user("Odd", FRAMES[:5], "?")], "v", [], [FRAMES[:5]], 2.0),
    ([user(IMAGES[0], FRAMES[:13], "both", IMAGES[1])], "pvp", [IMAGES[0], IMAGES[1]], [FRAMES[:13]], 2.0),
    ([user(FRAMES[:3], FRAMES[2:6], "two", fps=0.7)], "vv", [], [FRAMES[:3], FRAMES[2:6]], 0.7),
    ([user(FRAMES[:12], "slow", fps=0.01)], "v", [], [FRAMES[:12]], 0.01),
]
"""The last two are told apart by their times; the third and the last have more frames, or positions of these, than rows
or columns, which moves all that follows."""


@pytest.fixture(scope="module")
def expected_of_videos(oracle: Oracle) -> list[list[int]]:
    llm = oracle.llm()
    guesses = tokens(llm.chat([conversation for conversation, *_ in VIDEOS], GREEDY, use_tqdm=False))
    answers = []
    for (conversation, order, images, videos, fps), guess in zip(VIDEOS, guesses, strict=True):
        prompt = llm.preparer.chat(conversation, allow_local=True)
        if oracle.kind == "qwen3_vl":
            assert prompt.token_ids == oracle.with_videos(conversation, images, videos, fps)
        answers.append(oracle.greedy_with_videos(prompt.token_ids, images, videos, order, fps, guess))
    return answers


@pytest.mark.parametrize("budget", [9, 2048])
def test_answers_about_videos_are_those_of_transformers(
    oracle: Oracle, expected_of_videos: list[list[int]], budget: int
) -> None:
    llm = oracle.llm(max_num_batched_tokens=budget)
    conversations = [conversation for conversation, *_ in VIDEOS]
    assert tokens(llm.chat(conversations, GREEDY, use_tqdm=False)) == expected_of_videos
    again = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert tokens(again) == expected_of_videos
    assert all(result.num_cached_tokens > 0 and result.num_images_encoded == 0 for result in again)
    if budget != 2048:
        return
    alone = oracle.llm()
    assert [tokens(alone.chat(asked, GREEDY, use_tqdm=False))[0] for asked in conversations] == expected_of_videos


def test_prompts_have_videos_like_conversations(oracle: Oracle, expected_of_videos: list[list[int]]) -> None:
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    asked = [
        (f"{video}What is in it?", {"video": FRAMES[:4]}, {}),
        (f"{image}{video}both{image}", {"video": [FRAMES[:13]], "image": IMAGES[:2]}, {}),
        (f"{video}{video}two", {"video": [FRAMES[:3], FRAMES[2:6]]}, {"fps": 0.7}),
    ]
    prompts = [
        {
            "prompt": f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
            "multi_modal_data": media,
            "mm_processor_kwargs": kwargs,
        }
        for text, media, kwargs in asked
    ]
    results = oracle.llm().generate(prompts, GREEDY, use_tqdm=False)
    assert tokens(results) == [expected_of_videos[number] for number in (0, 2, 3)]


def test_where_frames_are_few_generate_agrees_on_positions(oracle: Oracle, expected_of_videos: list[list[int]]) -> None:
    """The oracle for positions against transformers' own."""
    conversation, _, _, [frames], _ = VIDEOS[0]
    prompt = oracle.llm(load="lazy").preparer.chat(conversation, allow_local=True)
    rows, grid = oracle.video(frames)
    assert prompt.images[0].image.grid == (2, grid[0, 1] // 2, grid[0, 2] // 2)
    ids = torch.tensor([prompt.token_ids])
    inputs = {
        "input_ids": ids,
        "mm_token_type_ids": 2 * (ids == oracle.model.config.video_token_id).int(),
        "pixel_values_videos": rows,
        "video_grid_thw": grid,
    }
    if oracle.kind == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([1.0])
    with torch.inference_mode():
        generated = oracle.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert generated[0, ids.shape[1] :].tolist() == expected_of_videos[0]


def test_preempted_requests_and_further_turns_keep_their_positions(
    oracle: Oracle, expected: list[list[int]], expected_of_videos: list[list[int]]
) -> None:
    conversations = [*CONVERSATIONS, *(conversation for conversation, *_ in VIDEOS)]
    answers = [*expected, *expected_of_videos]
    probe = oracle.llm(block_size=2)
    longest = max(len(probe.preparer.chat(asked, allow_local=True).token_ids) for asked in conversations) + NEW_TOKENS
    block = probe.engine.info.kv_cache_bytes // probe.engine.stats().kv_blocks_total
    tight = oracle.llm(block_size=2, kv_cache_memory=(longest // 2 + 8) * block, max_num_batched_tokens=100)
    assert chat_at_once(tight, conversations, GREEDY) == answers
    assert tight.engine.stats().preemptions > 0

    first = VIDEOS[2][0]
    said = probe.chat(first, GREEDY, use_tqdm=False)[0].outputs[0].text
    further = [*first, assistant(said), user("And", IMAGES[2], FRAMES[:2], "?")]
    [result] = probe.chat(further, GREEDY, use_tqdm=False)
    assert result.num_cached_tokens > 100, "the first turn should be found"
    images, videos = [IMAGES[0], IMAGES[1], IMAGES[2]], [FRAMES[:13], FRAMES[:2]]
    assert tokens([result]) == [oracle.greedy_with_videos(result.prompt_token_ids, images, videos, "pvppv")]


def test_a_video_beyond_the_positions_is_rejected(oracle: Oracle) -> None:
    llm = oracle.llm()
    asked = [user(FRAMES[:12], "slow", fps=0.001)]
    if oracle.kind != "qwen2_5_vl":
        assert tokens(llm.chat(asked, GREEDY, use_tqdm=False)), "its positions do not count seconds"
        return
    with pytest.raises(PromptTooLongError, match="24,000 positions, and the model has 4,096"):
        llm.chat(asked, GREEDY, use_tqdm=False)
    assert not llm.engine.has_work()


def logits_after(llm: LLM, conversation: list[dict[str, Any]]) -> torch.Tensor:
    """float32 ``[vocabulary]``, of the first token of the answer."""
    with record_logits(llm.engine.runner.model.language_model) as rows:  # type: ignore[attr-defined]
        llm.chat(conversation, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    return rows[-1][-1]


def test_bfloat16_is_within_its_own_rounding(oracle: Oracle) -> None:
    """As far from float32 as transformers' own bfloat16 is, and no further."""
    rounded = QWEN_CLASSES[oracle.kind][1].from_pretrained(oracle.folder, dtype=torch.bfloat16).eval()
    llm = oracle.llm(dtype="bfloat16")
    errors = []
    for conversation in CONVERSATIONS[:3]:
        inputs = oracle.inputs(conversation)
        with torch.inference_mode():
            exact, theirs = (model(**inputs).logits[0, -1].float() for model in (oracle.model, rounded))
        ours = logits_after(llm, conversation)
        errors.append(((ours - exact).square().mean(), (theirs - exact).square().mean()))
    assert sum(mine for mine, _ in errors) < 2 * sum(other for _, other in errors)


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(image)).decode()


def test_the_server_gives_the_same(
    oracle: Oracle, expected: list[list[int]], expected_of_videos: list[list[int]]
) -> None:
    if oracle.kind == "qwen2_vl":
        pytest.skip("what differs lies below the server")

    def over_http(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
        messages = []
        for message in conversation:
            content = message["content"]
            if isinstance(content, list):
                content = [
                    {"type": "image_url", "image_url": {"url": data_url(part["image"])}}
                    if part["type"] == "image"
                    else {**part, "video": list(map(data_url, part["video"]))}
                    if part["type"] == "video"
                    else part
                    for part in content
                ]
            messages.append({"role": message["role"], "content": content})
        return messages

    detokenize = oracle.llm(load="lazy").preparer.tokenizer.decode
    engine = {"engine": "real", "dtype": "float32", "device": "cpu", "kv_cache_memory": "16MiB"}
    with LiveServer(oracle.folder, engine=engine) as server:
        asked = [CONVERSATIONS[1], VIDEOS[2][0], VIDEOS[3][0]]
        for conversation, answer in zip(asked, [expected[1], *expected_of_videos[2:4]], strict=True):
            body = {"messages": over_http(conversation), "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
            answered = server.post(body).json()
            # Of a character that the last token does not finish, the server says nothing.
            texts = (answered["choices"][0]["message"]["content"], detokenize(answer))
            ours, theirs = (text.rstrip("\N{REPLACEMENT CHARACTER}") for text in texts)
            assert ours == theirs
        narrow = over_http([user(IMAGES[2])])
        lengths = []
        for limits in ({}, {"max_pixels": 600}):
            part = {**narrow[0]["content"][0], **limits}
            body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
            lengths.append(server.post(body).json()["usage"]["prompt_tokens"])
        assert lengths[1] < lengths[0]
        refused = server.post({"messages": [{"role": "user", "content": [{**part, "max_pixels": 10**6}]}]})
        assert refused.status_code == 400
        assert "max_pixels" in refused.json()["error"]["message"]
