"""Images for models that run by transformers' code: its prompts and its tokens, whatever else is going on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForImageTextToText, AutoProcessor, VipLlavaModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from tests.at_once import chat_at_once
from tests.blip import make_blip
from tests.checkpoints import TEXT, make_gemma3, make_llava, write_tokenizer
from tests.saved_models import save_model
from vlmserve import LLM, SamplingParams
from vlmserve.engine.messages import Add, decode_to_engine, encode
from vlmserve.errors import InvalidImageError, UnsupportedModelError
from vlmserve.kernels.choice import VARIABLE
from vlmserve.layers.stages import StageBudget
from vlmserve.models.transformers_vision import TransformersVision
from vlmserve.types import EngineRequest, FurtherInputs

NEW_TOKENS = 8
SIDE = 28
QUESTION = "How many circles are there?"
TOWER = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": SIDE,
    "patch_size": 14,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def write_json(folder: Path, name: str, **fields: Any) -> None:
    (folder / name).write_text(json.dumps(fields))


def tokenizer_with(folder: Path, *tokens: str) -> Tokenizer:
    tokenizer = write_tokenizer(folder, takes_images=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def make_vip_llava(folder: Path) -> Path:
    """LLaVA with features of several layers of its tower."""
    tokenizer = tokenizer_with(folder)
    config = transformers.VipLlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER),
        text_config=transformers.LlamaConfig(**TEXT, vocab_size=tokenizer.get_vocab_size() + 5),
        image_token_index=tokenizer.token_to_id("<image>"),
        vision_feature_layers=[-2, -3, 1],
        image_seq_length=4,
    )
    save_model(folder, transformers.VipLlavaForConditionalGeneration, config)
    size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    write_json(folder, "preprocessor_config.json", image_processor_type="CLIPImageProcessor", **size)
    write_json(
        folder, "processor_config.json", processor_class="LlavaProcessor", patch_size=14,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    return folder


def make_aya_vision(folder: Path) -> Path:
    """Tiles with words between them, whose placeholder is not what the template writes, before windows."""
    words = ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL", "<|IMG_LINE_BREAK|>", "<|IMG_PATCH|>")
    tokenizer = tokenizer_with(folder, *words)
    text = {**TEXT, "vocab_size": tokenizer.get_vocab_size() + 5, "pad_token_id": 0, "sliding_window": 11}
    config = transformers.AyaVisionConfig(
        vision_config=transformers.SiglipVisionConfig(**TOWER),
        text_config=transformers.Cohere2Config(**text, layer_types=["sliding_attention"] * 2 + ["full_attention"]),
        image_token_index=tokenizer.token_to_id("<|IMG_PATCH|>"),
        downsample_factor=2,
        adapter_layer_norm_eps=1e-6,
    )
    save_model(folder, transformers.AyaVisionForConditionalGeneration, config)
    write_json(
        folder, "preprocessor_config.json", image_processor_type="GotOcr2ImageProcessor",
        size={"height": SIDE, "width": SIDE}, crop_to_patches=True, min_patches=1, max_patches=4,
    )  # fmt: skip
    write_json(
        folder, "processor_config.json", processor_class="AyaVisionProcessor", patch_size=14, img_size=SIDE,
        image_token="<image>", downsample_factor=2,
    )  # fmt: skip
    return folder


def make_paligemma(folder: Path, **text: Any) -> Path:
    """All tokens of a prompt see each other, and a processor that writes whole prompts."""
    tokenizer = tokenizer_with(folder)
    text = {**TEXT, "vocab_size": tokenizer.get_vocab_size() + 5, "head_dim": 8, "model_type": "gemma", **text}
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**TOWER, projection_dim=48, vision_use_head=False),
        text_config=text,
        image_token_index=tokenizer.token_to_id("<image>"),
        projection_dim=48,
    )
    save_model(folder, transformers.PaliGemmaForConditionalGeneration, config)
    size = {"size": {"height": SIDE, "width": SIDE}, "image_seq_length": 4}
    write_json(folder, "preprocessor_config.json", image_processor_type="SiglipImageProcessor", **size)
    write_json(folder, "processor_config.json", processor_class="PaliGemmaProcessor")
    (folder / "chat_template.jinja").unlink()
    return folder


def make_paligemma2(folder: Path) -> Path:
    """The same through windows and capped scores."""
    return make_paligemma(folder, model_type="gemma2", sliding_window=32, query_pre_attn_scalar=20)


def make_seeing_gemma3(folder: Path) -> Path:
    """The tokens of each image see each other."""
    make_gemma3(folder)
    write_json(folder, "processor_config.json", processor_class="Gemma3Processor", image_seq_length=16)
    return folder


GRID_WORDS = {"image_token": "<image>", "vision_start_token": "<look>", "vision_end_token": "</look>"}


def make_in_grids(folder: Path, model_class: type, config: Any, **processor: Any) -> Path:
    """With positions in three axes. config: makes one of a text part, and takes the ids of special tokens."""
    tokenizer = tokenizer_with(folder, *GRID_WORDS.values(), "<video>")
    named = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder, "tokenizer_config.json", **named, extra_special_tokens={**GRID_WORDS, "video_token": "<video>"})
    ids = {f"{name}_id": tokenizer.token_to_id(token) for name, token in GRID_WORDS.items()}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {**TEXT, "vocab_size": tokenizer.get_vocab_size() + 5, "head_dim": 8, "rope_parameters": rope}
    save_model(folder, model_class, config(text, **ids, video_token_id=tokenizer.token_to_id("<video>")))
    limits = {"size": {"shortest_edge": 16 * 28**2, "longest_edge": 60 * 28**2}, "merge_size": 2}
    write_json(folder, "preprocessor_config.json", **limits, **processor)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template.replace("<image>", "<look><image></look>"))
    return folder


def make_paddleocr(folder: Path) -> Path:
    """With positions in three axes."""

    def config(text: dict[str, Any], **ids: int) -> Any:
        tower = {**TOWER, "spatial_merge_size": 2, "image_size": 56}
        return transformers.PaddleOCRVLConfig(text_config=text, vision_config=tower, **ids)

    make_in_grids(
        folder, transformers.PaddleOCRVLForConditionalGeneration, config, patch_size=14, temporal_patch_size=1,
        image_processor_type="PaddleOCRVLImageProcessor",
    )  # fmt: skip
    write_json(folder, "processor_config.json", processor_class="PaddleOCRVLProcessor")
    return folder


def make_qwen3_vl(folder: Path) -> Path:
    """Layers of the decoder, too, take something from an image."""

    def config(text: dict[str, Any], **ids: int) -> Any:
        tower = {
            "depth": 3, "hidden_size": 32, "intermediate_size": 56, "num_heads": 4, "patch_size": 14,
            "out_hidden_size": 48, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2],
        }  # fmt: skip
        return transformers.Qwen3VLConfig(text_config=text, vision_config=tower, **ids)

    return make_in_grids(
        folder, transformers.Qwen3VLForConditionalGeneration, config, patch_size=14, temporal_patch_size=2,
        image_processor_type="Qwen2VLImageProcessor",
    )  # fmt: skip


MODELS: dict[str, Callable[[Path], Path]] = {
    "llava": make_llava,
    "several layers": make_vip_llava,
    "tiles": make_aya_vision,
    "prompts that see ahead": make_paligemma,
    "prompts that see ahead through windows": make_paligemma2,
    "images that see themselves": make_seeing_gemma3,
    "grids": make_paddleocr,
    "images for several layers": make_qwen3_vl,
}


class ImagesOnly(Qwen3VLProcessor):
    """Without its part for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return argument and super().check_argument_for_proper_class(argument_name, argument)


@pytest.fixture(scope="module", autouse=True)
def _processors_without_videos() -> Iterator[None]:
    load = AutoProcessor.from_pretrained

    def from_pretrained(folder: Path, **settings: Any) -> Any:
        if json.loads((folder / "config.json").read_text())["model_type"] != "qwen3_vl":
            return load(folder, **settings)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        return ImagesOnly(images, tokenizer, chat_template=tokenizer.chat_template)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoProcessor, "from_pretrained", from_pretrained)
        yield


def make_image(seed: int, height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


WIDE = make_image(0, 60, 90)
IMAGES = [[WIDE], [make_image(1, 28, 28)], [make_image(2, 100, 40)], [make_image(3, 50, 50), WIDE], []]


def conversation(images: list[Image.Image]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]


@dataclass
class Oracle:
    """transformers' prompts and answers, one conversation at a time."""

    folder: Path
    images: list[list[Image.Image]]
    prompts: list[list[int]]
    answers: list[list[int]]

    @classmethod
    @torch.inference_mode()
    def of(cls, folder: Path) -> Oracle:
        processor = AutoProcessor.from_pretrained(folder)
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        # What has no form for conversations is asked about images only.
        oracle = cls(folder, IMAGES if processor.chat_template else IMAGES[:4], [], [])
        for images in oracle.images:
            if processor.chat_template is None:
                text = "<image>" * len(images) + QUESTION
            else:
                text = processor.apply_chat_template(
                    conversation([None] * len(images)), add_generation_prompt=True, tokenize=False
                )
            begun = text.startswith("<s>")
            inputs = processor(
                text=[text], images=[images] if images else None, return_tensors="pt", add_special_tokens=not begun
            )
            length = inputs["input_ids"].shape[1]
            answer = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0, length:]
            oracle.prompts.append(inputs["input_ids"][0].tolist())
            oracle.answers.append(answer.tolist())
        assert len({tuple(answer) for answer in oracle.answers}) > 2, "answers that are alike would prove little"
        return oracle

    def llm(self, **settings: Any) -> LLM:
        settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB", "block_size": 4, **settings}
        return LLM(str(self.folder), model_impl="transformers", **settings)


@pytest.fixture(scope="module", params=MODELS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.of(MODELS[request.param](tmp_path_factory.mktemp("theirs")))


def answers(llm: LLM, conversations: list[Any]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.chat(conversations, GREEDY, use_tqdm=False)]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.usefixtures("native_kernels")
def test_prompts_and_tokens_are_those_of_transformers(oracle: Oracle) -> None:
    conversations = [conversation(images) for images in oracle.images]
    llm = oracle.llm()
    alone = [llm.chat([one], GREEDY, use_tqdm=False)[0] for one in conversations]
    assert [result.prompt_token_ids for result in alone] == oracle.prompts
    assert [result.outputs[0].token_ids for result in alone] == oracle.answers
    encoded = llm.engine.stats().encoder_queries
    assert answers(llm, conversations) == oracle.answers, "with what is cached of them"
    assert llm.engine.stats().encoder_queries == encoded, "images that are seen again cost nothing"
    assert answers(oracle.llm(max_num_batched_tokens=9), conversations[::-1]) == oracle.answers[::-1]
    check_preempted(oracle, llm, oracle.llm)


def check_preempted(oracle: Oracle, roomy: LLM, make: Callable[..., LLM]) -> None:
    """Requests that are preempted have the same answers. make: opens the model with blocks of 4 tokens."""
    sizes = roomy.engine.runner.model.language_model.cache_bytes(4)  # type: ignore[attr-defined]
    longest = max(len(prompt) for prompt in oracle.prompts) + NEW_TOKENS
    preemptions = 0
    for spare in (5, 6):
        pages = (longest // 4 + spare) * len(sizes.windows)
        tight = make(kv_cache_memory=pages * sizes.page)
        conversations = [conversation(images) for images in oracle.images]
        assert chat_at_once(tight, conversations, GREEDY) == oracle.answers
        preemptions += tight.engine.stats().preemptions
        if preemptions:
            break
    # Where layers have a short window, all requests may fit.
    assert preemptions > 0 or sizes.windows[-1] is not None


@pytest.mark.parametrize("name", ["prompts that see ahead through windows", "grids", "images for several layers"])
def test_torchs_kernels_do_as_well(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is scheduled does not depend on the kernels: in chunks, with what is cached of them."""
    monkeypatch.setenv(VARIABLE, "torch")
    oracle = Oracle.of(MODELS[name](tmp_path))
    conversations = [conversation(images) for images in oracle.images]
    llm = oracle.llm(max_num_batched_tokens=30)
    assert answers(llm, conversations) == oracle.answers
    assert answers(llm, conversations[::-1]) == oracle.answers[::-1]


def test_an_unknown_family_runs_by_transformers(tmp_path: Path) -> None:
    oracle = Oracle.of(make_vip_llava(tmp_path))
    llm = LLM(str(tmp_path), dtype="float32", kv_cache_memory="8MiB")
    assert answers(llm, [conversation(images) for images in IMAGES]) == oracle.answers


def test_extra_tower_inputs_cross_to_the_engine(tmp_path: Path) -> None:
    llm = LLM(str(make_aya_vision(tmp_path)), kv_cache_memory="8MiB")
    prompt = llm.preparer.chat(conversation(IMAGES[0]), allow_local=True)
    sent = decode_to_engine(encode(Add([EngineRequest("1", prompt, GREEDY)])))
    assert isinstance(sent, Add)
    [before], [after] = ([span.image for span in images] for images in (prompt.images, sent.requests[0].prompt.images))
    assert isinstance(before.tiling, FurtherInputs)
    assert (after.tiling, after.text, after.num_tokens) == (before.tiling, before.text, before.num_tokens)
    further = [TransformersVision.further(image.tiling, torch.device("cpu")) for image in (before, after)]
    assert further[0].keys() == further[1].keys()
    assert all(torch.equal(value, further[1][name]) for name, value in further[0].items())


@torch.inference_mode()
def test_image_waits_for_its_whole_budget(tmp_path: Path) -> None:
    llm = LLM(str(make_vip_llava(tmp_path)), dtype="float32", kv_cache_memory="8MiB")
    [image] = [span.image for span in llm.preparer.chat(conversation(IMAGES[0]), allow_local=True).images]
    pixels, vision = torch.tensor(image.pixels), llm.engine.runner.model.vision  # type: ignore[attr-defined]
    products = vision.products(image.pixels.shape, image.tiling)
    budget = StageBudget(products - 1)
    stages = vision.in_stages([pixels], [image.tiling], budget)
    next(stages)
    assert budget.made == 0
    budget.left += 1
    with pytest.raises(StopIteration) as end:
        next(stages)
    assert budget.made == products
    assert torch.equal(end.value.value[0], vision.encode([pixels], [image.tiling])[0])


def test_pixels_for_another_implementation_are_rejected(tmp_path: Path) -> None:
    folder = make_llava(tmp_path)
    ours = LLM(str(folder), kv_cache_memory="8MiB")
    theirs = LLM(str(folder), kv_cache_memory="8MiB", model_impl="transformers")
    prompt = ours.preparer.chat(conversation(IMAGES[0]), allow_local=True)
    with pytest.raises(InvalidImageError, match="--model-impl transformers"):
        theirs.engine.add(EngineRequest("1", prompt, GREEDY))


def test_a_bad_image_ends_its_own_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle.of(make_vip_llava(tmp_path))
    llm = oracle.llm()
    look = VipLlavaModel.get_image_features
    dark = make_image(1, 28, 28).point(lambda _: 0)

    def get_image_features(self: VipLlavaModel, pixel_values: torch.Tensor, **further: Any) -> Any:
        if pixel_values.std(dim=(2, 3)).max() < 1e-6:
            raise RuntimeError("too dark")
        return look(self, pixel_values=pixel_values, **further)

    monkeypatch.setattr(VipLlavaModel, "get_image_features", get_image_features)
    conversations = [conversation(images) for images in ([dark], *IMAGES)]
    results = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert results[0].outputs[0].finish_reason == "error"
    assert [result.outputs[0].token_ids for result in results[1:]] == oracle.answers


def test_models_without_image_tokens_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no placeholder token for images"):
        LLM(str(make_blip(tmp_path)), model_impl="transformers")
