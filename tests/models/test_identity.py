"""Two models never share a key, and one has the same key wherever it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_llama
from tests.gguf_files import write_gguf
from vlmserve.engine.engine import Engine
from vlmserve.kernels.attention import LayerCache
from vlmserve.kernels.cpu_attention import CpuAttention
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.models import identity as identity_module
from vlmserve.models.hub import resolve_model
from vlmserve.models.identity import WHOLE_BYTES, cache_identity, model_identity, weights_digest
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint
from vlmserve.settings.config import EngineConfig
from vlmserve.settings.quantization import QuantizationConfig
from vlmserve.types import EngineRequest, Prompt, SamplingParams

BLOCK = LayerCache(torch.zeros(4, 2, 16, 8), torch.zeros(4, 2, 16, 8), 16)


def identity(folder: Path, **options) -> bytes:
    chosen = {"dtype": torch.float32, "implementation": "vlmserve", **options}
    return model_identity(folder, LoadSettings(torch.device("cpu"), **chosen))


@pytest.fixture
def folder(tmp_path):
    return make_llama(tmp_path / "model", shard_size="1GB")


def edit_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_identity_does_not_depend_on_the_folder(folder, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    edit_config(copy, _name_or_path="someone/else", transformers_version="5.99")
    assert identity(copy) == identity(folder)


def test_tensors_may_be_sharded_in_any_way(folder, tmp_path):
    assert weights_digest(make_llama(tmp_path / "shards", shard_size="20KB")) == weights_digest(folder)


def test_every_tensor_counts(folder):
    path = folder / "model.safetensors"
    tensors, seen = load_file(path), {identity(folder)}
    for name, tensor in tensors.items():
        changed = tensor.clone()
        changed.view(-1)[-1] += 1
        save_file({**tensors, name: changed}, path, metadata={"format": "pt"})
        seen.add(identity(folder))
    assert len(seen) == len(tensors) + 1


@pytest.mark.parametrize("width", [700, 5000])
def test_every_row_of_a_large_tensor_counts(tmp_path, width):
    tensor = torch.randn(37, width)
    assert tensor.nbytes > WHOLE_BYTES
    seen = set()
    for row in range(-1, len(tensor)):
        changed = tensor.clone()
        if row >= 0:
            changed[row] += 1
        save_file({"a": changed}, tmp_path / "model.safetensors")
        seen.add(weights_digest(tmp_path))
    assert len(seen) == len(tensor) + 1


def test_every_column_of_a_large_square_tensor_counts(tmp_path):
    tensor = torch.randn(512, 512)
    seen = set()
    for column in range(0, 512, 7):
        changed = tensor.clone()
        changed[:, column] += 1
        save_file({"a": changed}, tmp_path / "model.safetensors")
        seen.add(weights_digest(tmp_path))
    assert len(seen) == len(range(0, 512, 7))


def test_a_tensors_name_and_type_and_shape_count(tmp_path):
    tensor, seen = torch.zeros(8, 8), set()
    for tensors in ({"a": tensor}, {"b": tensor}, {"a": tensor.view(4, 16)}, {"a": tensor.to(torch.int32)}):
        save_file(tensors, tmp_path / "model.safetensors")
        seen.add(weights_digest(tmp_path))
    assert len(seen) == 4


def test_settings_and_the_way_of_computing_count(folder):
    seen = {
        identity(folder),
        identity(folder, implementation="transformers"),
        identity(folder, dtype=torch.bfloat16),
        identity(folder, quantization=QuantizationConfig(scheme="int8")),
        identity(folder, quantization=QuantizationConfig(scheme="int4")),
        identity(folder, quantization=QuantizationConfig(scheme="int4", group_size=64)),
        identity(folder, quantization=QuantizationConfig(scheme="int4", symmetric=True)),
        identity(folder, input_bits=8),
    }
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    seen.add(identity(folder))
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    seen.add(identity(folder))
    assert len(seen) == 10


@pytest.mark.parametrize("old_format", [False, True])
def test_pickled_checkpoints_differ_by_their_tensors(tmp_path, old_format):
    tensors = {"a": torch.randn(300, 300), "b": torch.randn(3)}
    seen = set()
    for name, place in (("a", -1), ("b", 0), ("b", 0)):
        tensors[name].view(-1)[place] += 1
        torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old_format)
        seen.add(weights_digest(tmp_path))
    assert len(seen) == 3


def test_gguf_identity_covers_tensors_and_metadata(folder, tmp_path):
    paths = [write_gguf(folder, tmp_path / "a.gguf"), write_gguf(folder, tmp_path / "b.gguf")]
    other = make_llama(tmp_path / "other", seed=1)
    paths.append(write_gguf(other, tmp_path / "c.gguf"))
    paths.append(write_gguf(folder, tmp_path / "d.gguf", metadata={"llama.rope.freq_base": 5.0}))
    first, second, third, fourth = map(identity, paths)
    assert first == second
    assert len({first, third, fourth}) == 3


def test_a_last_byte_of_a_gguf_file_counts(folder, tmp_path):
    path = write_gguf(folder, tmp_path / "a.gguf")
    before = identity(path)
    data = np.memmap(path, np.uint8, "r+")
    data[-1] ^= 255
    data.flush()
    assert identity(path) != before


def test_how_keys_and_values_are_stored_counts(folder):
    reference, native = TorchReference(), CpuAttention()
    seen = {
        cache_identity(b"model", reference, [BLOCK]),
        cache_identity(b"other", reference, [BLOCK]),
        cache_identity(b"model", native, [BLOCK]),
        cache_identity(b"model", reference, [BLOCK, BLOCK]),
        cache_identity(b"model", reference, [LayerCache(BLOCK.keys, BLOCK.values, 8)]),
        cache_identity(b"model", reference, [LayerCache(BLOCK.keys.char(), BLOCK.values.char(), 16)]),
        cache_identity(b"model", reference, [LayerCache(BLOCK.keys.char(), BLOCK.values.char(), 16, BLOCK.keys)]),
    }
    assert len(seen) == 7


def test_the_number_of_blocks_does_not_count():
    longer = LayerCache(torch.zeros(9, 2, 16, 8), torch.zeros(9, 2, 16, 8), 16)
    assert cache_identity(b"m", TorchReference(), [longer]) == cache_identity(b"m", TorchReference(), [BLOCK])


def test_block_keys_depend_on_the_model(tmp_path):
    def block_keys(folder: Path, name: str) -> frozenset[bytes]:
        config = EngineConfig(model=name, kv_cache_memory="1MiB", dtype="float32", device="cpu", block_size=4)
        engine = Engine(config, folder)
        engine.add(EngineRequest("a", Prompt(list(range(5, 17))), SamplingParams(temperature=0, max_tokens=2)))
        engine.step()
        [request] = engine.scheduler.running
        [chain] = request.chains
        return frozenset(chain.keys)

    first, other = make_llama(tmp_path / "a"), make_llama(tmp_path / "b", seed=1)
    shutil.copytree(first, tmp_path / "copy")
    keys = block_keys(first, "model")
    assert len(keys) == 1 + 3
    assert block_keys(tmp_path / "copy", "another/name") == keys
    assert not block_keys(other, "model") & keys


def test_the_built_in_model_has_an_identity():
    assert len(identity(resolve_model("pixie"))) == 32


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_loading_hashes_tensors_as_it_reads_them(folder, tmp_path, monkeypatch, kind):
    if kind == "gguf":
        folder = write_gguf(folder, tmp_path / "model.gguf")
    monkeypatch.setattr(identity_module, "WHOLE_BYTES", 2048)
    monkeypatch.setattr(identity_module, "MAPPED_BYTES", 4096)
    expected, description = weights_digest(folder), Description.read(folder)
    checkpoint = Checkpoint(folder, description.rename)
    spec = description.spec(checkpoint)
    cpu = torch.device("cpu")
    checkpoint.load(description.build(spec, TorchReference(), dtype=torch.float32, device=cpu).modules)
    maps = []
    monkeypatch.setattr(identity_module.mmap, "mmap", lambda *args, **options: maps.append(args))
    assert weights_digest(folder, checkpoint.digests) == expected
    assert not maps, "tensors were read again"
