"""Checkpoints that are sharded, incomplete, of the wrong shape or broken."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.checkpoints import change_config, change_tensors, make_llama, make_llava, rename_tensors
from tests.paged import PagedRun
from vlmserve.errors import MissingWeightsError, ModelLoadError
from vlmserve.memory import return_free_memory
from vlmserve.models import files, weights
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.registry import load_model
from vlmserve.models.weights import Checkpoint, canonical_name
from vlmserve.settings.quantization import QuantizationConfig


def load(folder: Path) -> LoadedModel:
    return load_model(folder, LoadSettings(device=torch.device("cpu"), dtype=torch.float32))


def logits(model: LoadedModel) -> torch.Tensor:
    decoder = model.language_model
    return PagedRun(decoder, [decoder.embed(torch.arange(20))]).finish([20])[0]


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "language_model.layers.0.self_attn.q_proj.weight"),
        ("lm_head.weight", "language_model.lm_head.weight"),
        ("layers.0.self_attn.q_proj.weight", "language_model.layers.0.self_attn.q_proj.weight"),
        ("embed_tokens.weight", "language_model.embed_tokens.weight"),
        ("norm.weight", "language_model.norm.weight"),
        ("language_model.model.norm.weight", "language_model.norm.weight"),
        ("language_model.lm_head.weight", "language_model.lm_head.weight"),
        ("vision_tower.vision_model.pre_layrnorm.bias", "vision_tower.pre_layrnorm.bias"),
        ("vision_tower.pre_layrnorm.bias", "vision_tower.pre_layrnorm.bias"),
        ("multi_modal_projector.linear_1.weight", "multi_modal_projector.linear_1.weight"),
        ("model.language_model.embed_tokens.weight", "language_model.embed_tokens.weight"),
        ("model.vision_tower.embeddings.class_embedding", "vision_tower.embeddings.class_embedding"),
        ("model.vision_tower.vision_model.pre_layrnorm.bias", "vision_tower.pre_layrnorm.bias"),
        ("model.multi_modal_projector.linear_2.bias", "multi_modal_projector.linear_2.bias"),
    ],
)
def test_every_layout_has_one_canonical_name(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical


def test_shards_load_like_a_single_file(tmp_path: Path) -> None:
    single, sharded = make_llama(tmp_path / "single"), make_llama(tmp_path / "sharded", shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(logits(load(single)), logits(load(sharded)))


def test_files_mapped_per_tensor_load_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_llama(tmp_path)
    expected = logits(load(folder))
    opened = []

    def count(path: Path, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, **options)

    monkeypatch.setattr(files, "safe_open", count)
    monkeypatch.setattr(weights, "MAPPED_BYTES", 1)
    assert torch.equal(logits(load(folder)), expected)
    assert len(opened) > 30, "a mapping that stays open counts as used memory"


def test_weights_take_the_type_that_is_asked_for(tmp_path: Path) -> None:
    folder = make_llama(tmp_path, dtype=torch.float16)
    assert load(folder).language_model.embed(torch.arange(3)).dtype == torch.float32


def test_missing_tensors_are_counted_and_named(tmp_path: Path) -> None:
    folder = make_llava(tmp_path)
    rename_tensors(folder, lambda name: None if ".mlp." in name else name)
    with pytest.raises(MissingWeightsError, match=r"lacks 2\d of .*layers\.0\.mlp\.gate_proj\.weight.* and \d+ more"):
        load(folder)


def test_a_missing_merged_part_is_noticed(tmp_path: Path) -> None:
    folder = make_llama(tmp_path)
    rename_tensors(folder, lambda name: None if name.endswith("layers.1.self_attn.k_proj.weight") else name)
    with pytest.raises(MissingWeightsError, match=r"lacks 1 of .*layers\.1\.self_attn\.k_proj\.weight$"):
        load(folder)


def test_a_wrong_shape_names_both_shapes(tmp_path: Path) -> None:
    folder = make_llama(tmp_path)
    change_tensors(folder, lambda name, tensor: (name, tensor[:-1] if "layers.2.mlp.down_proj" in name else tensor))
    with pytest.raises(ModelLoadError, match=r"layers\.2\.mlp\.down_proj\.weight has shape \[47, 80\].*\[48, 80\]"):
        load(folder)


def test_unused_tensors_are_no_error_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_llama(tmp_path)

    path = folder / "model.safetensors"
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**load_file(path), **extra}, path)
    with caplog.at_level(logging.DEBUG, logger="vlmserve.models.weights"):
        load(folder)
    assert "rotary_emb.inv_freq" in caplog.text


@pytest.mark.parametrize("stored", [True, False], ids=["stored head", "no stored head"])
def test_tied_embeddings_follow_what_is_stored(tmp_path: Path, stored: bool) -> None:
    """Whatever the config says, as transformers does: a head of its own is used, a missing one is the embeddings."""
    folder = make_llama(tmp_path, tie_word_embeddings=not stored)
    change_config(folder, tie_word_embeddings=True)
    expected = LlamaForCausalLM.from_pretrained(folder)(input_ids=torch.arange(20)[None]).logits[0]
    torch.testing.assert_close(logits(load(folder)), expected.detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("zipped", [True, False], ids=["today's format", "the old format"])
@pytest.mark.parametrize("shards", [1, 2])
def test_pickled_tensors_load_the_same(tmp_path: Path, zipped: bool, shards: int) -> None:
    folder = make_llama(tmp_path)
    expected = logits(load(folder))
    tensors = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(dict(tensors), folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    else:
        weight_map = {}
        for shard in range(shards):
            name = f"pytorch_model-0000{shard + 1}-of-00002.bin"
            part = dict(tensors[shard::shards])
            torch.save(part, folder / name, _use_new_zipfile_serialization=zipped)
            weight_map |= dict.fromkeys(part, name)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits(load(folder)), expected)
    checkpoint = Checkpoint(folder, rename=str)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in tensors)


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def a_pickle_that_is_none(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


class Surprise:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("it ran"),))


def a_pickle_with_code(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "more": Surprise()}, folder / "pytorch_model.bin")


def truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not weights at all")


def lost_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (remove_weights, MissingWeightsError, "has no .*safetensors"),
        (a_pickle_that_is_none, ModelLoadError, "convert it to safetensors"),
        (a_pickle_with_code, ModelLoadError, "convert it to safetensors"),
        (truncate, ModelLoadError, "broken or truncated"),
        (no_safetensors, ModelLoadError, "broken or truncated"),
        (lost_shard, MissingWeightsError, "model-00001-of-00002.safetensors is missing"),
        (broken_index, ModelLoadError, "index"),
    ],
)
def test_damaged_checkpoints_say_what_is_wrong(
    tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    folder = make_llama(tmp_path)
    damage(folder)
    with pytest.raises(error, match=message):
        load(folder)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that takes far more memory than what else a process allocates."""
    sizes = {"hidden_size": 1008, "intermediate_size": 4032, "num_hidden_layers": 5}
    return make_llama(tmp_path_factory.mktemp("large"), **sizes, dtype=torch.bfloat16)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the peak of memory")
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantizing_never_holds_the_plain_model(large: Path, scheme: Literal["int8", "int4"]) -> None:
    plain = (large / "model.safetensors").stat().st_size
    quantization = QuantizationConfig(scheme=scheme)
    return_free_memory()
    before = memory_in_use("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    model = load_model(large, LoadSettings(device=torch.device("cpu"), dtype=torch.bfloat16, quantization=quantization))
    assert model.weight_bytes < 0.6 * plain
    # The plain model would be all of `plain`. Pages of the mapped file count too, until they are dropped.
    assert memory_in_use("VmHWM") - before < model.weight_bytes + 0.75 * plain


def memory_in_use(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at their peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
