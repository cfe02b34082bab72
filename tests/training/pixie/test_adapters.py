"""The recipe of pixie's adapters writes checkpoints that are served."""

from __future__ import annotations

import json

import torch
from tokenizers import Tokenizer

from training.pixie.adapters import (
    MIXTURE,
    QUESTIONS_OF_ROW,
    Questions,
    base_model,
    train_adapter,
)
from training.pixie.export import IMAGE_TOKENS
from training.pixie.mixture import ROUTER, train_mixture
from training.pixie.rows import squash
from training.pixie.skills import SKILLS, sample_questions
from training.pixie.tokenizer import IMAGE, encode_example
from vlmserve.engine.engine import Engine
from vlmserve.models.hub import resolve_model
from vlmserve.settings.config import EngineConfig


def test_adapters_and_classifier_are_trained_and_written(tmp_path):
    tokenizer = Tokenizer.from_file(str(resolve_model("pixie") / "tokenizer.json"))
    for skill in SKILLS:
        train_adapter(skill, tokenizer, tmp_path, steps=1, batch=2, count=4)
    train_mixture(tokenizer, tmp_path, count=5, router_steps=1, steps=2)
    engine = Engine(EngineConfig(model="pixie", enable_lora=True, kv_cache_memory="16MiB"))
    for name in (*SKILLS, f"{MIXTURE}/{ROUTER}", MIXTURE):
        engine.adapter_store.load(name, tmp_path / name)
        content = (tmp_path / name / "adapter_config.json").read_text()
        assert str(tmp_path) not in content
        assert json.loads(content)["base_model_name_or_path"] == "pixie"


def test_packed_questions_equal_questions_alone():
    tokenizer = Tokenizer.from_file(str(resolve_model("pixie") / "tokenizer.json"))
    model = base_model()
    rows = Questions(model.model, tokenizer, ["corners"], 8)
    inputs, tokens, said = rows.batch(range(8), model.get_input_embeddings())
    with torch.inference_mode():
        packed = model(**inputs).logits[:, :-1][said[:, 1:]]
    answers = tokens[:, 1:][said[:, 1:]]
    kinds = set()
    seen = 0
    for number in range(8):
        examples = sample_questions(number, "corners", QUESTIONS_OF_ROW)
        for example in examples[:2] if examples[0].text_first else examples:
            ids, spoken = encode_example(tokenizer, example)
            place = ids.index(IMAGE)
            ids = torch.tensor([ids[:place] + [IMAGE] * IMAGE_TOKENS + ids[place + 1 :]])
            pixels = torch.from_numpy(squash(example.scenes[0]).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
            with torch.inference_mode():
                alone = model(input_ids=ids, pixel_values=pixels).logits[0, -1 - sum(spoken) : -1]
            assert answers[seen : seen + len(alone)].tolist() == ids[0, -len(alone) :].tolist()
            assert torch.allclose(packed[seen : seen + len(alone)], alone, atol=2e-2)
            seen += len(alone)
        kinds.add(example.text_first)
    assert seen == len(packed)
    assert kinds == {False, True}
