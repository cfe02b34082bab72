"""Several ranks give the tokens of one, whose tokens other tests compare with transformers': every family, weights of
few bits, images, whatever else goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pydantic
import pytest

import vlmserve.engine.ranks
from tests.blip import CLASSES as BLIP
from tests.blip import BlipOracle
from tests.checkpoints import make_gemma3, make_llama, make_llava, make_text_model
from tests.engine.image_parity import CONVERSATIONS
from tests.engine.kinds import by_kernels
from tests.engine.test_blip import ASKED as BLIP_ASKED
from tests.engine.test_original_families import KINDS as ORIGINAL
from tests.engine.test_original_families import Oracle as OriginalOracle
from tests.engine.test_parity import MIXED as LLAVA_MIXED
from tests.engine.test_parity import Oracle, engine_for, generate
from tests.engine.test_qwen_vl import CLASSES as QWEN_VL
from tests.engine.test_qwen_vl import MIXED as QWEN_VL_MIXED
from tests.engine.test_qwen_vl import make_oracle as make_qwen_vl
from tests.engine.test_tiles import MAKERS
from tests.gguf_files import write_gguf
from tests.mmproj_files import write_pair
from tests.models.test_families import FAMILIES, MIXTURES, make
from tests.models.test_gguf import BLOCKS
from tests.moondream import Moondream
from tests.ocr_checkpoints import make_glm4v
from tests.ranks import GlooThreads, RankThreads
from tests.test_mmproj import assert_same_answers, llm
from vlmserve.cache.costs import CostModel
from vlmserve.errors import ConfigurationError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.kernels.choice import VARIABLE
from vlmserve.models.quantized import save_quantized
from vlmserve.models.registry import read_json
from vlmserve.settings.config import MediaConfig
from vlmserve.settings.quantization import QuantizationConfig
from vlmserve.types import BeamSearch, EngineRequest, Grammar, Prompt, SamplingParams

ANSWER = 6
"""Tokens of an answer."""


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlmserve.engine.ranks, "RankProcesses", RankThreads)


@dataclass
class Case:
    """A checkpoint and prompts for it."""

    folder: Path
    prompts: list[Prompt]

    @property
    def oracle(self) -> Oracle:
        """As those functions take it that only want to know where the checkpoint is."""
        return cast(Oracle, self)


def texts(folder: Path, lengths: tuple[int, ...] = (40, 1, 23, 9)) -> Case:
    config = read_json(folder / "config.json")
    oracle = Oracle(folder, None, None, (), 0, config.get("vocab_size", 300))
    return Case(folder, [oracle.prompt(seed, length) for seed, length in enumerate(lengths)])


def llava(folder: Path) -> Case:
    make_llava(folder)
    config = read_json(folder / "config.json")
    side = config["vision_config"]["image_size"]
    tokens = (side // config["vision_config"]["patch_size"]) ** 2
    oracle = Oracle(folder, None, config["image_token_index"], (3, side, side), tokens, 50)
    return Case(folder, [oracle.prompt(seed, *parts) for seed, parts in enumerate(LLAVA_MIXED[:6])])


def original(folder: Path, name: str) -> Case:
    _, maker, overrides, parts = ORIGINAL[name]
    oracle = OriginalOracle(maker(folder, **overrides), None)
    return Case(folder, [oracle.prompt(seed, *some) for seed, some in enumerate(parts[:5])])


def qwen_vl(folder: Path, kind: str) -> Case:
    oracle = make_qwen_vl(folder, kind)
    return Case(folder, [oracle.prompt(seed, *parts) for seed, parts in enumerate(QWEN_VL_MIXED[:5])])


def conversations(folder: Path) -> Case:
    preparer = RequestPreparer(folder, MediaConfig())
    return Case(folder, [preparer.chat([message], allow_local=True) for message in CONVERSATIONS[:5]])


def blip(folder: Path, kind: str) -> Case:
    oracle = BlipOracle.make(folder, kind)
    return Case(oracle.folder, [oracle.prompt(*asked) for asked in BLIP_ASKED[:5]])


def moondream(folder: Path) -> Case:
    oracle = Moondream.make(folder, n_kv_heads=2)
    return Case(folder, [oracle.prompt(*asked) for asked in [(0, 5, 0), (1, 1, 1), (2, 17, 2)]])


SPLIT_ALIKE = (
    "llama with truncated yarn", "llama with dynamic rope", "mistral", "ministral3", "smollm3", "qwen3 with biases",
    "phi3 with a window", "phi3 with longrope, short", "starcoder2 with a window", "gemma", "olmo2 with biases",
    "LLaVA-NeXT over Mistral with a window", "SmolVLM",
)  # fmt: skip
"""Models whose ranks have the same parts as those of another: each knows positions and windows as one rank does."""
TIGHT = (
    "llama with yarn", "gemma2", "qwen", "qwen_vl", "qwen3_vl", "LLaVA-NeXT", "Pixtral", "blip question", "llava",
    "gemma3 with images", "moondream",
)  # fmt: skip
"""Those which run preempted and with what is cached, too. What is scheduled does not depend on the family: one of each
kind of positions, windows, images and states of a request."""
CASES: dict[str, Callable[[Path], Case]] = {
    **{name: lambda folder, name=name: texts(make(folder, name)) for name in FAMILIES if name not in SPLIT_ALIKE},
    **{name: lambda folder, name=name: texts(make(folder, name)) for name in MIXTURES},
    **{name: lambda folder, name=name: original(folder, name) for name in ORIGINAL},
    **{name: lambda folder, name=name: qwen_vl(folder, name) for name in QWEN_VL},
    **{
        name: lambda folder, maker=maker: conversations(maker(folder))
        for name, maker in MAKERS.items()
        if name not in SPLIT_ALIKE
    },
    **{f"blip {name}": lambda folder, name=name: blip(folder, name) for name in BLIP},
    "llava": llava,
    "gemma3 with images": lambda folder: conversations(make_gemma3(folder)),
    "GLM-4.5V": lambda folder: conversations(make_glm4v(folder, kind="Glm4vMoe")),
    "moondream": moondream,
}


def check(case: Case, ranks: int = 2, *, tight: bool = True, answer: int = ANSWER, **settings: Any) -> None:
    """The tokens of one rank, in a batch of chunks, and if `tight` with what is cached and preempted. answer: how
    many."""
    settings = {"block_size": 4, **settings}
    alone = engine_for(case.oracle, **settings)
    expected = generate(alone, case.prompts, max_tokens=answer)
    assert len({tuple(tokens) for tokens in expected}) > (len(expected) // 2 if answer > 1 else 1), (
        "answers alike would prove little"
    )
    settings["tensor_parallel_size"] = ranks
    settings["max_num_batched_tokens"] = 100 if case.prompts[0].images else 16
    engine = engine_for(case.oracle, **settings)
    assert engine.info.num_parameters == alone.info.num_parameters
    assert generate(engine, case.prompts, max_tokens=answer) == expected
    if not tight:
        return
    page_bytes = engine.info.kv_cache_bytes // engine.stats().kv_blocks_total
    sizes = alone.runner.model.language_model.cache_bytes(4)
    longest = max(len(prompt.token_ids) for prompt in case.prompts) + answer
    pages = sizes.pages(longest, settings["max_num_batched_tokens"]) + 4 * len(sizes.windows)
    small = engine_for(case.oracle, **{**settings, "kv_cache_memory": pages * page_bytes})
    for _ in range(2):
        assert generate(small, case.prompts, max_tokens=answer) == expected


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, name: str) -> None:
    check(CASES[name](tmp_path), tight=name in TIGHT)


@pytest.mark.parametrize("name", ["qwen2", "stablelm 2", "olmo2"])
def test_torchs_kernels_and_gloo_do_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(vlmserve.engine.ranks, "RankProcesses", GlooThreads)
    monkeypatch.setenv(VARIABLE, "torch")
    check(CASES[name](tmp_path), tight=name == "olmo2")


@pytest.mark.parametrize("name", ["qwen3 with biases", "phi with normed heads", "olmo2"])
def test_more_ranks_than_heads_of_keys_share_them(tmp_path: Path, name: str) -> None:
    family, overrides = FAMILIES[name]
    transformers = pytest.importorskip("transformers")
    classes = (getattr(transformers, f"{family}ForCausalLM"), getattr(transformers, f"{family}Config"))
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    case = texts(make_text_model(tmp_path, *classes, **{**overrides, **sizes}))
    check(case, ranks=4, tight=name == "olmo2")


# Weights of few bits

WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Sizes with which each of two ranks has whole groups of 32 inputs."""


@by_kernels("scheme, tied", native=[("int8", True), ("int4", False)], torch=[("int8", False), ("int4", True)])
def test_quantized_at_load(tmp_path: Path, scheme: str, tied: bool) -> None:
    case = texts(make_llama(tmp_path, **WIDE, tie_word_embeddings=tied, attention_bias=True))
    check(case, quantize=scheme, tight=False)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantized_checkpoints(tmp_path: Path, scheme: str) -> None:
    make_llama(tmp_path / "plain", **WIDE)
    save_quantized(tmp_path / "plain", tmp_path / "saved", QuantizationConfig(scheme=scheme))
    check(texts(tmp_path / "saved"), tight=False)


def test_a_checkpoint_with_groups_that_ranks_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These layers have plain weights. Native products of 4 bits round their inputs, those of torch do not."""
    monkeypatch.setenv(VARIABLE, "torch")
    make_llama(tmp_path / "plain", **{**WIDE, "intermediate_size": 96})
    save_quantized(tmp_path / "plain", tmp_path / "saved", QuantizationConfig(scheme="int4"))
    check(texts(tmp_path / "saved"), tight=False)


@pytest.mark.parametrize(
    ("types", "dtype"), [("Q8_0", "float32"), ("Q4_1", "bfloat16"), ("Q4_K", "float32"), ("Q6_K", "bfloat16")]
)
def test_gguf_files(tmp_path: Path, types: str, dtype: str) -> None:
    """In bfloat16, sums of two ranks are rounded otherwise: only the first tokens are far enough from all others."""
    folder = make_llama(tmp_path, **BLOCKS)
    case = Case(write_gguf(folder, tmp_path / "model.gguf", types=types), texts(folder).prompts)
    check(case, dtype=dtype, tight=False, answer=1 if dtype == "bfloat16" else ANSWER)


def test_a_pair_of_gguf_files(tmp_path: Path) -> None:
    model, mmproj = write_pair(make_llava(tmp_path / "folder"), tmp_path / "pair", "llava")
    assert_same_answers(llm(model, mmproj, tensor_parallel_size=2), llm(model, mmproj))


def test_groups_that_ranks_would_divide_are_refused(tmp_path: Path) -> None:
    case = texts(make_llama(tmp_path, **{**WIDE, "intermediate_size": 96}))
    with pytest.raises(ConfigurationError, match=r"48 inputs of .*down_proj"):
        engine_for(case.oracle, quantize="int4", tensor_parallel_size=2)


# Everything else that an engine does


def test_int8_cache_host_blocks_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostModel, "worth_saving", lambda self: True)
    check(llava(tmp_path), kv_cache_dtype="int8", kv_offload_memory="8MiB", disk_cache=str(tmp_path / "disk"))
    assert [*(tmp_path / "disk").iterdir()]


class Answer(pydantic.BaseModel):
    """A format whose class cannot be sent anywhere."""

    count: int


def test_sampling_grammars_logprobs_and_aborts(tmp_path: Path) -> None:
    """Only rank 0 samples; the others have to hear of each token, and of requests that end at any time."""
    case = llava(tmp_path)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9, "top_p": 0.95, "seed": 7, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"temperature": 0, "grammar": Grammar.json(Answer)},
        {"temperature": 0, "ignore_eos": False, "logit_bias": {2: 2.0}},
    ]

    def answers(ranks: int) -> dict[str, list[Any]]:
        engine = engine_for(case.oracle, tensor_parallel_size=ranks, max_num_batched_tokens=50, block_size=4)
        found: dict[str, list[Any]] = {}  # in which step an image is encoded depends on the machine
        num_steps = 0
        for turn in range(2):
            for number, prompt in enumerate(case.prompts):
                params = SamplingParams(**{"max_tokens": ANSWER, **kinds[number % len(kinds)]})
                engine.add(EngineRequest(f"{turn} {number}", prompt, params))
                engine.add(EngineRequest(f"{turn} {number} aborted", prompt, params))
            while engine.has_work():
                for one in engine.step():
                    if not one.request_id.endswith("aborted"):
                        found.setdefault(one.request_id, []).extend([*one.token_ids, one.finish_reason])
                num_steps += 1
                engine.abort([f"{turn} {num_steps % 6} aborted"])
        return found

    assert answers(2) == answers(1)


def test_beam_search(tmp_path: Path) -> None:
    case = texts(make(tmp_path, "qwen2"))

    def beams(ranks: int) -> list[Any]:
        engine = engine_for(case.oracle, tensor_parallel_size=ranks, block_size=4)
        for number, prompt in enumerate(case.prompts):
            engine.add(EngineRequest(str(number), prompt, SamplingParams(max_tokens=ANSWER), beams=BeamSearch(3)))
        found = {}
        while engine.has_work():
            for output in engine.step():
                found[output.request_id] = [answer.token_ids for answer in output.beams or ()]
        return sorted(found.items())

    assert beams(2) == beams(1)


# What cannot be split


@pytest.mark.parametrize(
    ("sizes", "ranks", "words"),
    [
        ({}, 4, "6 attention heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "3 key-value heads; use a size that divides 3 or"),
        ({"intermediate_size": 81}, 2, "81 inner elements of its MLP"),
    ],
)
def test_sizes_that_ranks_do_not_divide_are_refused(
    tmp_path: Path, sizes: dict[str, int], ranks: int, words: str
) -> None:
    case = texts(make_llama(tmp_path, **sizes))
    with pytest.raises(ConfigurationError, match=f"--tensor-parallel-size {ranks}: the model has {words}"):
        engine_for(case.oracle, tensor_parallel_size=ranks)
