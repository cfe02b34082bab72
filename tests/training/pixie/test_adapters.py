"""The recipe of pixie's adapters writes checkpoints that are served."""

from __future__ import annotations

import json

from tokenizers import Tokenizer

from training.pixie.adapters import MIXTURE, train_adapter, train_mixture
from vlmserve.config import EngineConfig
from vlmserve.engine.engine import Engine
from vlmserve.models.hub import resolve_model
from vlmserve.pixie.skills import SKILLS


def test_adapters_and_the_classifier_over_them_are_trained_and_written(tmp_path):
    tokenizer = Tokenizer.from_file(str(resolve_model("pixie") / "tokenizer.json"))
    for skill in SKILLS:
        train_adapter(skill, tokenizer, tmp_path, steps=1, batch=2, count=4)
    train_mixture(tokenizer, tmp_path, steps=1, batch=2, count=4)
    engine = Engine(EngineConfig(model="pixie", enable_lora=True, kv_cache_memory="16MiB"))
    for name in (*SKILLS, MIXTURE):
        engine.adapter_store.load(name, tmp_path / name)
        content = (tmp_path / name / "adapter_config.json").read_text()
        assert str(tmp_path) not in content
        assert json.loads(content)["base_model_name_or_path"] == "pixie"
