"""How vectors are made, by sentence-transformers' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlmserve.errors import InvalidRequestError, ModelLoadError
from vlmserve.prompt.pooling import StoredLayer, read_vectors
from vlmserve.tasks import Embed


def write(folder: Path, pooling: dict[str, Any], *others: str) -> Path:
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    modules.append({"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    modules += [{"path": f"2_{name}", "type": f"sentence_transformers.models.{name}"} for name in others]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


OLDER = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": False}


@pytest.mark.parametrize(
    ("config", "others", "expected"),
    [
        ({**OLDER, "pooling_mode_lasttoken": True}, ["Normalize"], Embed("last", normalize=True)),
        ({**OLDER, "pooling_mode_mean_tokens": True}, [], Embed("mean", normalize=False)),
        ({"embedding_dimension": 8, "pooling_mode": "cls"}, ["Normalize"], Embed("cls", normalize=True)),
    ],
)
def test_files_choose_pooling_and_normalization(tmp_path, config, others, expected):
    vectors = read_vectors(write(tmp_path, config, *others))
    assert vectors.is_declared
    assert vectors.embed() == expected
    assert vectors.embed(4, normalize=False) == Embed(expected.pooling, False, 4)


def test_models_without_files_take_the_last_token(tmp_path):
    vectors = read_vectors(tmp_path)
    assert (vectors.is_declared, vectors.embed()) == (False, Embed("last", normalize=True))


def test_a_setting_overrides_files(tmp_path):
    write(tmp_path, {"pooling_mode": "max"})
    assert read_vectors(tmp_path, "mean").embed() == Embed("mean", normalize=False)
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "a", "type": "a.Unknown"}]))
    assert read_vectors(tmp_path, "cls").embed() == Embed("cls", normalize=False)


def test_texts_are_messages_where_the_transformer_reads_them(tmp_path):
    path = write(tmp_path, {"pooling_mode": "mean"}) / "sentence_bert_config.json"
    config: dict[str, Any] = {"modality_config": {"text": {}}}
    path.write_text(json.dumps(config))
    assert (read_vectors(tmp_path).message_options, read_vectors(tmp_path).begins_answers) == (None, True)
    config["modality_config"]["message"] = {}
    path.write_text(json.dumps(config))
    assert read_vectors(tmp_path).message_options == {"add_generation_prompt": False, "template_settings": {}}
    options = {"add_generation_prompt": True, "restore_suffix": False, "padding": True, "a": 3}
    path.write_text(json.dumps({**config, "processing_kwargs": {"chat_template": options}}))
    vectors = read_vectors(tmp_path)
    assert vectors.message_options == {"add_generation_prompt": True, "template_settings": {"a": 3}}
    assert vectors.begins_answers


def test_dense_modules_are_found(tmp_path):
    write(tmp_path, {"pooling_mode": "mean"}, "Dense", "Normalize")
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps({"activation_function": "torch.nn.a.Identity"}))
    vectors = read_vectors(tmp_path)
    assert vectors.layers == (StoredLayer("linear", "2_Dense", "Identity"),)
    for config, problem in (
        ({"activation_function": "torch.nn.a.Own"}, "the activation Own"),
        ({"use_residual": True}, "a Dense module that reads more than the pooled vector"),
        ({"module_input_name": "token_embeddings"}, "a Dense module that reads more than the pooled vector"),
    ):
        (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(config))
        with pytest.raises(InvalidRequestError, match=problem):
            read_vectors(tmp_path).embed()


@pytest.mark.parametrize(
    ("config", "others", "problem"),
    [
        ({"pooling_mode": "weightedmean"}, [], "the pooling mode weightedmean"),
        ({"pooling_mode": ["cls", "mean"]}, [], r"the pooling mode cls\+mean"),
        ({"pooling_mode": "mean"}, ["LayerNorm"], "the module LayerNorm"),
        ({"pooling_mode": "mean"}, ["Normalize", "Dense"], "the module Dense after Normalize"),
    ],
)
def test_unsupported_vectors_are_explained(tmp_path, config, others, problem):
    vectors = read_vectors(write(tmp_path, config, *others))
    with pytest.raises(InvalidRequestError, match=f"{problem}, which is not supported; start with --pooling"):
        vectors.embed()


@pytest.mark.parametrize("text", ["{", "{}", "[1]"])
def test_broken_module_lists_are_named(tmp_path, text):
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"modules\.json"):
        read_vectors(tmp_path)
