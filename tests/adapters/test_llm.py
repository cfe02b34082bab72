"""Adapters offline, and the flags of a server about them."""

from __future__ import annotations

import pytest

from tests.adapters.test_serving import write_adapter
from tests.checkpoints import make_llama
from vlmserve import LLM, LoRARequest, SamplingParams
from vlmserve.errors import AdapterError, InvalidRequestError, UnknownModelError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CONVERSATION = [{"role": "user", "content": "How many green triangles are there?"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llm")
    options = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB"}
    llm = LLM(str(make_llama(folder / "base", max_position_embeddings=2048)), enable_lora=True, **options)
    requests = [
        LoRARequest(f"a{number}", number, str(write_adapter(folder / str(number), number))) for number in (1, 2)
    ]
    return llm, requests


def test_each_conversation_is_answered_by_its_adapter(llm):
    model, requests = llm
    alone = [model.chat([CONVERSATION], GREEDY, False, lora_request=one)[0] for one in (None, *requests)]
    together = model.chat([CONVERSATION] * 3, GREEDY, False, lora_request=[None, *requests])
    tokens = [result.outputs[0].token_ids for result in together]
    assert tokens == [result.outputs[0].token_ids for result in alone]
    assert len(set(map(tuple, tokens))) == 3
    by_name = model.generate("How many?", GREEDY, False, lora_request=LoRARequest("a1"))
    assert by_name[0].text != model.generate("How many?", GREEDY, False)[0].text
    assert "".join(model.stream(CONVERSATION, GREEDY, lora_request=requests[0])) == alone[1].text


def test_another_path_is_another_adapter(llm):
    model, (first, second) = llm
    expected = model.chat([CONVERSATION], GREEDY, False, lora_request=second)[0].text
    moved = LoRARequest(first.lora_name, 1, second.lora_path)
    assert model.chat([CONVERSATION], GREEDY, False, lora_request=moved)[0].text == expected
    assert model.chat([CONVERSATION], GREEDY, False, lora_request=first)[0].text != expected


def test_wrong_adapters_are_refused_before_anything_runs(llm):
    model, requests = llm
    for wrong, error, message in [
        (LoRARequest("new", 3, "/nowhere"), AdapterError, "no folder"),
        (LoRARequest("new"), UnknownModelError, "give its lora_path"),
        (requests, InvalidRequestError, "one lora_request for all"),
    ]:
        with pytest.raises(error, match=message):
            model.chat([CONVERSATION], GREEDY, False, lora_request=wrong)
