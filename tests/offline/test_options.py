"""Wrong uses of the Python API are explained."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from tests.mock_checkpoint import make_mock_checkpoint
from vlmserve import LLM, AsyncLLM, SamplingParams
from vlmserve.errors import ConfigurationError, InvalidRequestError
from vlmserve.offline.options import KINDS, LLMOptions, VLLMOptions, set_up
from vlmserve.settings.base import annotation_parts
from vlmserve.settings.vllm_flags import VALUES, entry_called

ASK = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtpye": "float32"}, "there is no option dtpye; did you mean dtype?"),
        ({"max_image": 3, "seeed": 1}, "there is no option max_image; did you mean max_images?; there is no option"),
        ({"gpu_memory_utilisation": 0.5}, "no option gpu_memory_utilisation; did you mean gpu_memory_utilization?"),
        ({"gpu_memory_utilization": 5}, "gpu_memory_utilization 5: must be at most 1"),
        ({"gpu_memory_utilization": 0.5, "memory_fraction": 0.5}, "set the same; give only one"),
        ({"limit_mm_per_prompt": {"audio": 1}}, "limit_mm_per_prompt: there are limits for image and video, not audio"),
        ({"limit_mm_per_prompt": 3}, "limit_mm_per_prompt '3': write it as JSON"),
        ({"task": "embed"}, "task embed: only models that generate text are supported"),
        ({"quantization": "fp8"}, "others are quantized by quantize int8 or int4"),
        ({"tokenizer": "other"}, "LLM has no option tokenizer. A tokenizer belongs to its checkpoint"),
        ({"cpu_offload_gb": 4}, "Weights stay on one device; quantize int8 or int4 reduces their size"),
        ({"zzz": 1}, "there is no option zzz"),
        ({"dtype": "half-and-half"}, "dtype half-and-half: must be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ({"max_model_len": "abc"}, "max_model_len abc: must be a whole number"),
        ({"max_images": -1}, "max_images -1: must be at least 0"),
    ],
)  # fmt: skip
def test_options_are_checked_before_anything_is_loaded(options, message):
    with pytest.raises(ConfigurationError) as caught:
        LLM("./no/such/model", **options)
    assert message in str(caught.value)
    assert "Input should" not in str(caught.value)


def test_vllms_options_set_ours(mock_folder):
    theirs: dict[str, Any] = dict(
        tokenizer=mock_folder,
        engine="mock",
        gpu_memory_utilization=0.5,
        limit_mm_per_prompt={"image": 3, "video": {"count": 1}},
        swap_space=4,
        mm_processor_cache_gb=0,
        dtype="half",
        task="generate",
        trust_remote_code=True,
        quantization=None,
        max_model_len=256,
        max_num_seqs=5,
        tensor_parallel_size=1,
        enforce_eager=True,
        enable_chunked_prefill=False,
        disable_log_stats=True,
        cpu_offload_gb=0,
        seed=None,
        hf_overrides={},
        load="lazy",
    )
    ours: dict[str, Any] = dict(
        engine="mock",
        memory_fraction=0.5,
        max_images=3,
        max_videos=1,
        kv_offload_memory="4GiB",
        image_cache_memory=0,
        dtype="float16",
        max_model_len=256,
        max_num_seqs=5,
        enforce_eager=True,
        load="lazy",
    )
    assert set_up(mock_folder, theirs)[:3] == set_up(mock_folder, ours)[:3]


def test_dtypes_of_torch_are_options(mock_folder):
    assert LLM(mock_folder, engine="mock", dtype=torch.bfloat16, load="lazy").config.dtype == "bfloat16"


def test_editors_know_all_options():
    """Add a new field of the settings to `LLMOptions` as well."""
    fields = {name: field for kind in KINDS for name, field in kind.model_fields.items() if name != "model"}
    own = {
        name: hint
        for name, hint in get_type_hints(LLMOptions, localns={"torch": torch}).items()
        if name not in VLLMOptions.__annotations__
    }
    assert own.keys() == fields.keys()
    for name, field in fields.items():
        parts = annotation_parts(field)
        inner = set(get_args(own[name])) or {own[name]}
        assert (type(None) in inner) == (type(None) in get_args(field.annotation)), name
        for kind in (bool, int, float, str):
            assert kind not in parts or kind in inner or kind in get_args(own[name]), name
        choices = {choice for part in parts if get_origin(part) is Literal for choice in get_args(part)}
        known = {choice for part in (own[name], *inner) if get_origin(part) is Literal for choice in get_args(part)}
        assert choices <= known <= choices | VALUES.get(name, {}).keys(), name


def test_editors_know_vllms_options(mock_folder):
    for name in VLLMOptions.__annotations__:
        assert entry_called(name) is not None
        assert name not in LLM(mock_folder, engine="mock", load="lazy", **{name: None}).config.model_fields_set


@pytest.mark.parametrize(
    "messages", ["Hello", ["Hello", "Hi"], b"Hello", 5, None, {"role": "user", "content": "Hello"}], ids=str
)
def test_wrong_conversations_are_rejected_with_an_example(mock_llm, messages):
    with pytest.raises(InvalidRequestError, match=r'messages must be a list of messages, like \[\{"role": "user"'):
        mock_llm.chat(messages, use_tqdm=False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.chat(ASK, sampling_param=1), "chat.. has no argument sampling_param; did you mean"),
        (lambda llm: llm.chat(ASK, tools=[{}]), "chat.. has no argument tools; serve the model"),
        (lambda llm: llm.generate(prompt_token_ids=[1], prompts=None), 'give the prompt as {"prompt_token_ids"'),
        (lambda llm: llm.generate("a", use_tdqm=False), "no argument use_tdqm; did you mean use_tqdm"),
    ],
)
def test_misspelt_arguments_are_explained(mock_llm, call, message):
    with pytest.raises(TypeError, match=message):
        call(mock_llm)


def test_misspelt_arguments_of_async_ones_are_explained():
    with pytest.raises(TypeError, match=r"chat\(\) has no argument sampling_param; did you mean sampling_params"):
        AsyncLLM.__new__(AsyncLLM).chat(ASK, sampling_param=1)


def test_harmless_arguments_of_vllm_are_accepted(mock_llm):
    harmless = {"tools": None, "continue_final_message": False, "chat_template_content_format": "openai"}
    assert mock_llm.chat(ASK, use_tqdm=False, **harmless)[0].text
    assert mock_llm.generate({"prompt": "a", "multi_modal_uuids": {"image": "b"}}, use_tqdm=False)[0].text
    assert mock_llm.get_default_sampling_params() == mock_llm.default_sampling_params


def test_methods_that_are_missing_are_explained(mock_llm):
    with pytest.raises(AttributeError, match="LLM has no classify; use chat, generate, stream, embed or score"):
        mock_llm.classify("a")
    with pytest.raises(AttributeError, match="no attribute 'generat'; did you mean generate"):
        mock_llm.generat("a")
    assert not hasattr(mock_llm, "encode")


def test_the_tokenizer_is_transformers_own(mock_llm):
    [result] = mock_llm.generate("hello", SamplingParams(max_tokens=4), use_tqdm=False)
    tokenizer = mock_llm.get_tokenizer()
    assert tokenizer.decode(result.outputs[0].token_ids) == result.text
    assert tokenizer.encode("hello") == result.prompt_token_ids


def test_reprs_are_short(mock_llm):
    [result] = mock_llm.generate("hello " * 60, SamplingParams(max_tokens=40), use_tqdm=False)
    assert len(repr(result)) < 700
    assert repr(result.text) in repr(result)
    assert repr(result.outputs[0]).startswith("CompletionOutput(text=")


@pytest.fixture(scope="module")
def mock_folder(tmp_path_factory) -> str:
    return str(make_mock_checkpoint(tmp_path_factory.mktemp("mock")))


@pytest.fixture(scope="module")
def mock_llm(mock_folder) -> LLM:
    return LLM(mock_folder, engine="mock")
