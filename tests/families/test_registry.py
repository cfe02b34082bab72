"""Every family's paths lead to code, and one registration is all that a new family needs."""

from __future__ import annotations

import contextlib
import json
import pkgutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torch import Tensor

from tests.checkpoints import make_llava
from vlmserve import LLM, SamplingParams
from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.families.family import Family, VisionFamily
from vlmserve.families.registry import (
    LANGUAGE_FAMILIES,
    VISION_FAMILIES,
    architecture,
    family_of,
    image_processor_path,
    register,
    vision_family,
)
from vlmserve.layers.stages import StageBudget, Stages
from vlmserve.media.image_files import ImageFiles
from vlmserve.media.processor import FixedSizeProcessor
from vlmserve.models.vision.llava import LlavaVision
from vlmserve.prompt.checkpoint import read_prompt_files

ALL: list[Family] = [*LANGUAGE_FAMILIES.values(), *VISION_FAMILIES.values()]


@pytest.mark.parametrize("family", ALL, ids=lambda family: f"{type(family).__name__} {family.model_type}")
def test_paths_of_a_family_lead_to_code(family: Family) -> None:
    paths = [family.tokenizer]
    if isinstance(family, VisionFamily):
        paths += [family.tower, family.image_processor, family.prompts]
        assert family.text_type in LANGUAGE_FAMILIES
    assert all(callable(pkgutil.resolve_name(path)) for path in paths if path is not None)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"architectures": ["LlavaForConditionalGeneration"]}, "llava"),
        ({"model_type": "llava"}, "llava"),
        ({"model_type": "llava", "vision_config": {"model_type": "pixtral"}}, "pixtral"),
        ({"architectures": ["BlipForQuestionAnswering"], "model_type": "blip"}, "blip_vqa"),
        ({"model_type": "blip"}, "blip"),
        ({"model_type": "qwen", "visual": {}}, "qwen_vl"),
        ({"model_type": "qwen", "visual": None}, None),
        ({"model_type": "qwen2"}, None),
        # The architecture decides: a model of another one may have parts that ours does not know.
        ({"architectures": ["OtherForConditionalGeneration"], "model_type": "llava"}, None),
        ({}, None),
    ],
)
def test_config_json_names_its_family(config: dict[str, Any], key: str | None) -> None:
    found = vision_family(config)
    assert (found and found.key) == key


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.sampled_from(["image_start_id", "x"]), values),
    max_leaves=4,
)
FIELDS = {
    "architectures": JSON | st.just(["QWenLMHeadModel"]) | st.just(["LlavaForConditionalGeneration"]),
    "model_type": JSON | st.sampled_from(sorted({family.model_type for family in ALL})),
    "visual": JSON,
    "vision_config": JSON,
    "image_token_id": JSON,
    "image_token_index": JSON,
    "text_config": JSON | st.just({"eos_token_id": [[]]}),
    "eos_token_id": JSON,
}


@given(config=st.fixed_dictionaries({}, optional=FIELDS))
def test_untrusted_config_json_has_a_family_or_none(config: dict[str, Any]) -> None:
    family = family_of(config)
    if isinstance(family, VisionFamily):
        try:
            placeholder = family.placeholder(config)
        except ModelLoadError:
            return
        assert placeholder is None or isinstance(placeholder, int)


@given(config=st.fixed_dictionaries({}, optional=FIELDS))
def test_untrusted_config_json_has_prompts_or_an_error(config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        with contextlib.suppress(ModelLoadError):
            ends = read_prompt_files(Path(folder)).end_token_ids
            assert all(isinstance(token_id, int) for token_id in ends)


def test_names_of_language_models_are_found() -> None:
    assert architecture({"architectures": ["ChatGLMModel"]}) == "ChatGLMForConditionalGeneration"
    assert architecture({"model_type": "olmo2"}) == "Olmo2ForCausalLM"
    assert architecture({"architectures": ["Qwen3Model"]}) == "Qwen3ForCausalLM"
    with pytest.raises(UnsupportedModelError, match="'Qwen3Model' is not supported"):
        architecture({"architectures": ["Qwen3Model"], "is_causal": False})
    assert family_of({"model_type": "paligemma"}) is VISION_FAMILIES["paligemma"]
    with pytest.raises(UnsupportedModelError, match=r"not supported, LlamaForCausalLM and .* would be"):
        architecture({"architectures": ["LlamaForCausalLMs"]})
    with pytest.raises(ModelLoadError, match="names neither"):
        architecture({"architectures": []})


def test_checkpoint_picks_image_processor_with_family_default() -> None:
    qwen, llava = VISION_FAMILIES["qwen3_vl"], VISION_FAMILIES["llava"]
    assert image_processor_path(None, qwen) == qwen.image_processor
    assert image_processor_path("PixtralImageProcessor", qwen) == VISION_FAMILIES["pixtral"].image_processor
    for unclaimed in ("CLIPImageProcessor", "LlavaImageProcessor"):
        assert image_processor_path(unclaimed, qwen) == llava.image_processor


class MirrorVision(LlavaVision):
    def tiles_in_stages(self, tiles: Tensor, budget: StageBudget) -> Stages[Tensor]:
        return (yield from super().tiles_in_stages(tiles.flip(-1), budget))


class MirrorProcessor(FixedSizeProcessor):
    @classmethod
    def from_files(cls, files: ImageFiles) -> Self:
        return cls(files.config, {**files.settings, "image_processor_type": "CLIPImageProcessor"})


def mirror_family(image_token_id: int, template: str) -> VisionFamily:
    return VisionFamily(
        model_type="mirror",
        architecture="MirrorForConditionalGeneration",
        text_type="llama",
        tower=f"{__name__}:MirrorVision",
        image_processor=f"{__name__}:MirrorProcessor.from_files",
        image_processor_types=("Mirror",),
        image_token_id=image_token_id,
        chat_template=lambda config, generation_config: template,
    )


@pytest.fixture
def mirrored(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A LLaVA checkpoint and a made-up family's with the same weights, whose tower mirrors images."""
    llava, mirror = make_llava(tmp_path / "llava"), make_llava(tmp_path / "mirror")
    template = mirror / "chat_template.jinja"
    config = json.loads((mirror / "config.json").read_text())
    (placeholder,) = {config.pop(name) for name in ("image_token_index", "image_token_id") if name in config}
    register(mirror_family(placeholder, template.read_text()))
    config |= {"model_type": "mirror", "architectures": ["MirrorForConditionalGeneration"]}
    (mirror / "config.json").write_text(json.dumps(config))
    processor = mirror / "preprocessor_config.json"
    settings = {**json.loads(processor.read_text()), "image_processor_type": "MirrorImageProcessor"}
    processor.write_text(json.dumps(settings))
    template.unlink()
    yield llava, mirror
    del VISION_FAMILIES["mirror"]


def test_one_registration_adds_a_family_with_images(mirrored: tuple[Path, Path]) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8))
    turned = [image, ImageOps.mirror(image)]

    def answers(folder: Path) -> list[Any]:
        llm = LLM(str(folder), dtype="float32", device="cpu", kv_cache_memory="16MiB")
        asked = [
            [{"role": "user", "content": [{"type": "image", "image": one}, {"type": "text", "text": "What?"}]}]
            for one in turned
        ]
        outputs = llm.chat(asked, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1))
        llm.close()
        return [(list(output.outputs[0].token_ids), output.outputs[0].cumulative_logprob) for output in outputs]

    llava, mirror = map(answers, mirrored)
    assert [tokens for tokens, _ in mirror] == [tokens for tokens, _ in reversed(llava)]
    assert [score for _, score in mirror] == pytest.approx([score for _, score in reversed(llava)], abs=1e-4)
    assert llava[0][1] != pytest.approx(llava[1][1], abs=1e-4), "the images make a difference"
