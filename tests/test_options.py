"""Wrong uses of the Python API are explained."""

from __future__ import annotations

import pytest

from vlmserve import LLM
from vlmserve.errors import ConfigurationError, InvalidRequestError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtpye": "float32"}, "there is no option dtpye; did you mean dtype?"),
        ({"max_image": 3, "seeed": 1}, "there is no option max_image; did you mean max_images?; there is no option"),
        ({"gpu_memory_utilization": 0.5}, "no option gpu_memory_utilization; it is called memory_fraction here"),
        ({"limit_mm_per_prompt": {"image": 1}}, "it is called max_images and max_videos here"),
        ({"trust_remote_code": True}, "there is no option trust_remote_code: Code from a checkpoint is never run"),
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


@pytest.mark.parametrize(
    "messages", ["Hello", ["Hello", "Hi"], b"Hello", 5, None, {"role": "user", "content": "Hello"}], ids=str
)
def test_what_is_no_conversation_is_refused_with_an_example(mock_llm, messages):
    with pytest.raises(InvalidRequestError, match=r'messages must be a list of messages, like \[\{"role": "user"'):
        mock_llm.chat(messages, use_tqdm=False)


@pytest.fixture(scope="module")
def mock_llm(tmp_path_factory) -> LLM:
    from tests.mock_checkpoint import make_mock_checkpoint

    return LLM(str(make_mock_checkpoint(tmp_path_factory.mktemp("mock"))), engine="mock")
