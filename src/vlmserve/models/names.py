"""Short names of models on the Hugging Face hub, and the memory that each needs. Imports no torch."""

from __future__ import annotations

import difflib
from typing import NamedTuple

BYTES = {"bfloat16": 2.0, "int8": 1.0, "int4": 0.625}
"""Of a weight by ``--dtype`` or ``--quantize``: int4 has a scale and a least value, of 16 bits each, for 32 weights."""
KV_SHARE = 0.25
"""The share of free memory that is taken to be left to the KV cache, to images and to everything else."""
_SUGGESTED = 4
_TEXT, _IMAGES, _VIDEOS = "text", "text, images", "text, images, videos"


class NamedModel(NamedTuple):
    """A row of the table, whose numbers are those of the published weights.

    repository: on the hub, with weights in bfloat16. takes: kinds of input. parameters: all, tied ones once.
    head: of the output head, which has 8 bits at least. kept: what stays in 16 bits, the vision tower, the projector
    and embeddings that are not tied to the head.
    """

    name: str
    repository: str
    takes: str
    parameters: int
    head: int
    kept: int = 0

    def memory(self, weights: str) -> int:
        """Bytes of the weights. weights: a key of `BYTES`."""
        layers = self.parameters - self.head - self.kept
        if weights == "bfloat16":
            return round(self.parameters * BYTES["bfloat16"])
        return round(layers * BYTES[weights] + self.head * BYTES["int8"] + self.kept * BYTES["bfloat16"])

    def fits(self, free: int, weights: str) -> bool:
        """Whether so many bytes hold the weights and leave a share to the KV cache."""
        return self.memory(weights) <= free * (1 - KV_SHARE)


MODELS = (
    NamedModel("smolvlm2:256m", "HuggingFaceTB/SmolVLM2-256M-Video-Instruct", _VIDEOS, 256484928, 28385280, 121896192),
    NamedModel("smolvlm2:500m", "HuggingFaceTB/SmolVLM2-500M-Video-Instruct", _VIDEOS, 507482304, 47308800, 145538304),
    NamedModel("smolvlm2:2.2b", "HuggingFaceTB/SmolVLM2-2.2B-Instruct", _VIDEOS, 2246784880, 100925440, 535146352),
    NamedModel("qwen3-vl:2b", "Qwen/Qwen3-VL-2B-Instruct", _VIDEOS, 2127532032, 311164928, 406957056),
    NamedModel("qwen3-vl:4b", "Qwen/Qwen3-VL-4B-Instruct", _VIDEOS, 4437815808, 388956160, 415347712),
    NamedModel("qwen3-vl:8b", "Qwen/Qwen3-VL-8B-Instruct", _VIDEOS, 8767123696, 622329856, 1198718192),
    NamedModel("qwen3-vl:32b", "Qwen/Qwen3-VL-32B-Instruct", _VIDEOS, 33357390064, 777912320, 1373179120),
    NamedModel("qwen2.5-vl:3b", "Qwen/Qwen2.5-VL-3B-Instruct", _VIDEOS, 3754622976, 311164928, 668684288),
    NamedModel("qwen2.5-vl:7b", "Qwen/Qwen2.5-VL-7B-Instruct", _VIDEOS, 8292166656, 544997376, 1221547520),
    NamedModel("qwen2.5-vl:32b", "Qwen/Qwen2.5-VL-32B-Instruct", _VIDEOS, 33452718336, 778567680, 1467409664),
    NamedModel("qwen2-vl:2b", "Qwen/Qwen2-VL-2B-Instruct", _VIDEOS, 2208985600, 233373696, 665271296),
    NamedModel("qwen2-vl:7b", "Qwen/Qwen2-VL-7B-Instruct", _VIDEOS, 8291375616, 544997376, 1220756480),
    NamedModel("gemma3:4b", "google/gemma-3-4b-it", _IMAGES, 4300079472, 671252480, 419816304),
    NamedModel("gemma3:12b", "google/gemma-3-12b-it", _IMAGES, 12187325040, 1006878720, 421290864),
    NamedModel("gemma3:27b", "google/gemma-3-27b-it", _IMAGES, 27432406640, 1409630208, 423060336),
    NamedModel("glm-ocr:0.9b", "zai-org/GLM-OCR", _VIDEOS, 1107405824, 91226112, 525346304),
    NamedModel("paddleocr-vl:0.9b", "PaddlePaddle/PaddleOCR-VL", _IMAGES, 943350384, 105906176, 582602352),
    NamedModel("llava-1.5:7b", "llava-hf/llava-1.5-7b-hf", _IMAGES, 7063427072, 131334144, 455821312),
    NamedModel("llava-1.5:13b", "llava-hf/llava-1.5-13b-hf", _IMAGES, 13351494656, 164167680, 499142656),
    NamedModel("smollm2:135m", "HuggingFaceTB/SmolLM2-135M-Instruct", _TEXT, 134515008, 28311552),
    NamedModel("smollm2:360m", "HuggingFaceTB/SmolLM2-360M-Instruct", _TEXT, 361821120, 47185920),
    NamedModel("smollm2:1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", _TEXT, 1711376384, 100663296),
    NamedModel("smollm3:3b", "HuggingFaceTB/SmolLM3-3B", _TEXT, 3075098624, 262668288),
    NamedModel("qwen3:0.6b", "Qwen/Qwen3-0.6B", _TEXT, 596049920, 155582464),
    NamedModel("qwen3:1.7b", "Qwen/Qwen3-1.7B", _TEXT, 1720574976, 311164928),
    NamedModel("qwen3:4b", "Qwen/Qwen3-4B", _TEXT, 4022468096, 388956160),
    NamedModel("qwen3:8b", "Qwen/Qwen3-8B", _TEXT, 8190735360, 622329856, 622329856),
    NamedModel("qwen3:14b", "Qwen/Qwen3-14B", _TEXT, 14768307200, 777912320, 777912320),
    NamedModel("qwen2.5:0.5b", "Qwen/Qwen2.5-0.5B-Instruct", _TEXT, 494032768, 136134656),
    NamedModel("qwen2.5:1.5b", "Qwen/Qwen2.5-1.5B-Instruct", _TEXT, 1543714304, 233373696),
    NamedModel("qwen2.5:7b", "Qwen/Qwen2.5-7B-Instruct", _TEXT, 7615616512, 544997376, 544997376),
    NamedModel("llama3.2:1b", "meta-llama/Llama-3.2-1B-Instruct", _TEXT, 1235814400, 262668288),
    NamedModel("llama3.2:3b", "meta-llama/Llama-3.2-3B-Instruct", _TEXT, 3212749824, 394002432),
    NamedModel("llama3.1:8b", "meta-llama/Llama-3.1-8B-Instruct", _TEXT, 8030261248, 525336576, 525336576),
    NamedModel("mistral:7b", "mistralai/Mistral-7B-Instruct-v0.3", _TEXT, 7248023552, 134217728, 134217728),
    NamedModel("gemma3:1b", "google/gemma-3-1b-it", _TEXT, 999885952, 301989888),
    NamedModel("phi4-mini:3.8b", "microsoft/Phi-4-mini-instruct", _TEXT, 3836021760, 614596608),
)
_REPOSITORIES = {model.name: model.repository for model in MODELS}


def repository_of(name: str) -> str | None:
    """The repository that a short name stands for; None for what is no short name."""
    return _REPOSITORIES.get(name.lower())


def is_short(name: str) -> bool:
    """Whether a name can be nothing but a short one, known or not: a family, or what has a size behind a colon."""
    return "/" not in name and (":" in name or any(known.startswith(f"{name.lower()}:") for known in _REPOSITORIES))


def suggestion(name: str) -> str:
    """Short names like another name, as the end of an error message; empty if there are none."""
    name = name.lower().rpartition("/")[2]
    family = name.partition(":")[0]
    near = [known for known in _REPOSITORIES if known.startswith(f"{family}:")]
    near = near or difflib.get_close_matches(name, _REPOSITORIES, n=_SUGGESTED, cutoff=0.7)
    return f"; did you mean {' or '.join(near[:_SUGGESTED])}?" if near else ""


HEADINGS = ("Name", "Repository", "Takes", "Billion parameters", *(f"GB in {weights}" for weights in BYTES))


def rows() -> list[tuple[str, ...]]:
    """The table as text, in the order of `HEADINGS`. GB: 10^9 bytes of weights."""
    return [
        (
            model.name,
            model.repository,
            model.takes,
            f"{model.parameters / 1e9:.2f}",
            *(f"{model.memory(weights) / 1e9:.1f}" for weights in BYTES),
        )
        for model in MODELS
    ]


def markdown() -> str:
    """The table as it stands in the documentation."""
    lines = [HEADINGS, ("---",) * 3 + ("---:",) * (len(HEADINGS) - 3), *rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
