"""What may be wrong with a pair of GGUF files, models in several parts, and which files of many are taken."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import httpx
import huggingface_hub
import pytest
import torch
from PIL import Image
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.checkpoints import make_llama, make_llava, make_qwen_vl, make_text_model
from tests.gguf_files import write_gguf
from tests.mmproj_files import CONVERSIONS, Files, write_pair
from tests.normalized import normalized
from tests.ocr_checkpoints import make_glm_ocr
from vlmserve.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    MissingWeightsError,
    ModelLoadError,
    TooManyImagesError,
    UnsupportedModelError,
    VLMServeError,
)
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.gguf.choice import Choice, choose_files
from vlmserve.gguf.pair import language_model, make_pair, read_pair
from vlmserve.gguf_header import read_header
from vlmserve.models.hub import resolve_model
from vlmserve.models.identity import model_identity
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.quantized import save_quantized
from vlmserve.models.registry import Description, load_model
from vlmserve.models.weights import Checkpoint
from vlmserve.settings.config import MediaConfig
from vlmserve.settings.quantization import QuantizationConfig

CPU = torch.device("cpu")
QUESTION = [
    {"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (8, 8))}, {"type": "text", "text": "?"}]}
]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("llava") / "folder")


@pytest.fixture(scope="module")
def files(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_pair(llava, tmp_path_factory.mktemp("pair"), "llava")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Files:
    place = tmp_path_factory.mktemp("qwen")
    return write_pair(make_qwen_vl(place / "folder", "qwen2_vl"), place / "pair", "qwen2_vl")


def with_metadata(llava: Path, out: Path, **metadata: Any) -> Path:
    """A vision tower that says something else."""
    return write_pair(llava, out, "llava", metadata={f"clip.{key}": value for key, value in metadata.items()}).mmproj


def identity(folder: Path) -> bytes:
    return model_identity(folder, LoadSettings(CPU, torch.float32, implementation="vlmserve"))


def test_the_same_files_are_the_same_checkpoint(llava: Path, files: Files, tmp_path: Path) -> None:
    folder = resolve_model(str(files.model), mmproj=str(files.mmproj))
    assert resolve_model(str(files.model), mmproj=str(files.mmproj)) == folder
    assert read_pair(folder) == files
    assert language_model(folder) == files.model
    other = write_pair(make_llava(tmp_path / "folder", seed=1), tmp_path / "pair", "llava")
    mixed = resolve_model(str(files.model), mmproj=str(other.mmproj))
    assert len({identity(folder), identity(mixed), identity(files.model)}) == 3


def test_temporary_folders_replace_a_missing_cache(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    folder = resolve_model(str(files.model), mmproj=str(files.mmproj))
    assert "vlmserve-gguf-" in str(folder)
    assert read_pair(folder) == files


def test_a_folder_with_both_files_is_a_checkpoint(files: Files, tmp_path: Path) -> None:
    for name, path in (("model-Q4_0.gguf", files.model), ("mmproj-model-f16.gguf", files.mmproj)):
        (tmp_path / name).symlink_to(path)
    pair = read_pair(resolve_model(str(tmp_path)))
    assert pair == (tmp_path / "model-Q4_0.gguf", tmp_path / "mmproj-model-f16.gguf")
    (tmp_path / "mmproj-model-f16.gguf").unlink()
    assert resolve_model(str(tmp_path)) == tmp_path / "model-Q4_0.gguf"


def test_images_without_a_tower_are_rejected(files: Files) -> None:
    preparer = RequestPreparer(files.model, MediaConfig())
    with pytest.raises(TooManyImagesError, match=r"without a vision tower.*--mmproj"):
        preparer.chat(QUESTION, allow_local=True)
    assert preparer.chat([{"role": "user", "content": "Hello"}]).token_ids


@pytest.mark.parametrize(
    ("metadata", "kind", "words"),
    [
        (
            {"projector_type": "resampler"},
            UnsupportedModelError,
            r"'resampler' is not supported; supported are gemma3, glm4v",
        ),
        ({"has_vision_encoder": False, "has_audio_encoder": True}, UnsupportedModelError, "audio is not supported"),
        ({"vision.block_count": None}, ModelLoadError, r"lacks clip\.vision\.block_count"),
        ({"vision.patch_size": 0}, ModelLoadError, r"clip\.vision\.patch_size is 0"),
        ({"vision.embedding_length": 64}, ModelLoadError, "has shape"),
        (
            {"vision.mm_patch_merge_type": "spatial_unpad"},
            ModelLoadError,
            r"clip\.vision\.image_grid_pinpoints is not a list of widths and heights",
        ),
        ({"vision.block_count": 9}, MissingWeightsError, r"encoder\.layers\.3\.layer_norm1"),
    ],
    ids=str,
)
def test_what_a_vision_tower_says_wrongly_is_named(
    llava: Path, files: Files, tmp_path: Path, metadata: dict[str, Any], kind: type[VLMServeError], words: str
) -> None:
    mmproj = with_metadata(llava, tmp_path / "pair", **metadata)
    with pytest.raises(kind, match=words):
        load_model(resolve_model(str(files.model), mmproj=str(mmproj)), LoadSettings(device=CPU, dtype=torch.float32))


def test_a_glm_4v_tower_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = CONVERSIONS["glm_ocr"]

    def tensors(*checkpoint: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from own.tensors(*checkpoint)
        yield "v.norm_embd.weight", torch.ones(32)

    monkeypatch.setitem(CONVERSIONS, "glm_ocr", replace(own, tensors=tensors))
    files = write_pair(make_glm_ocr(tmp_path / "folder"), tmp_path / "pair", "glm_ocr")
    with pytest.raises(UnsupportedModelError, match=r"no glm_ocr model that is supported has a tensor v\.norm_embd"):
        load_model(make_pair(*files), LoadSettings(device=CPU, dtype=torch.float32))


def test_files_that_do_not_belong_together_are_refused(files: Files, qwen: Files, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"is for qwen2_vl, but .* is llama"):
        resolve_model(str(files.model), mmproj=str(qwen.mmproj))
    plain = make_text_model(tmp_path / "folder", Qwen2ForCausalLM, Qwen2Config)
    model = write_gguf(plain, tmp_path / "model.gguf", architecture=gguf.MODEL_ARCH.QWEN2VL)
    with pytest.raises(ModelLoadError, match=r"has no token <\|image_pad\|>"):
        resolve_model(str(model), mmproj=str(qwen.mmproj))
    place = tmp_path / "qwen3"
    metadata = {"qwen3vl.n_deepstack_layers": 3}
    third = write_pair(make_qwen_vl(place / "folder", "qwen3_vl"), place / "pair", "qwen3_vl", text_metadata=metadata)
    with pytest.raises(ModelLoadError, match=r"has features for 2 layers, but .* needs 3"):
        resolve_model(str(third.model), mmproj=str(third.mmproj))
    place = tmp_path / "qwen35"
    fourth = write_pair(make_qwen_vl(place / "folder", "qwen3_5"), place / "pair", "qwen3_5")
    with pytest.raises(ModelLoadError, match=r"has features for 2 layers, which Qwen3\.5 does not take"):
        resolve_model(str(fourth.model), mmproj=str(third.mmproj))


def test_embeddings_of_another_width_are_refused(files: Files, tmp_path: Path) -> None:
    wide = make_llama(tmp_path / "folder", hidden_size=64, num_attention_heads=8)
    model = write_gguf(wide, tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match=r"makes embeddings of 48 values, but .* needs 64"):
        resolve_model(str(model), mmproj=str(files.mmproj))


def test_files_of_another_kind_are_refused(llava: Path, files: Files, tmp_path: Path) -> None:
    model, mmproj = map(str, files)
    with pytest.raises(ConfigurationError, match=r"is a vision tower: give the .* of its language model"):
        resolve_model(mmproj)
    with pytest.raises(ConfigurationError, match=r"holds a language model \(llama\)"):
        resolve_model(model, mmproj=model)
    with pytest.raises(CheckpointNotFoundError, match=r"there is no such file; give the path of a \.gguf file"):
        resolve_model(model, mmproj=str(tmp_path / "missing.gguf"))
    with pytest.raises(ConfigurationError, match=r"--mmproj goes with a \.gguf file"):
        resolve_model(str(llava), mmproj=mmproj)
    folder = resolve_model(model, mmproj=mmproj)
    with pytest.raises(ConfigurationError, match="not GGUF files"):
        load_model(folder, LoadSettings(device=CPU, implementation="transformers"))


def test_a_quantized_copy_has_the_vision_tower(llava: Path, files: Files, tmp_path: Path) -> None:
    pair = resolve_model(str(files.model), mmproj=str(files.mmproj))
    config = QuantizationConfig(scheme="int8", vision=True)
    save_quantized(llava, tmp_path / "of folder", config)
    save_quantized(pair, tmp_path / "of pair", config)
    towers = [
        load_model(tmp_path / out, LoadSettings(device=CPU, dtype=torch.float32)).vision
        for out in ("of folder", "of pair")
    ]
    prompts = [
        RequestPreparer(tmp_path / out, MediaConfig()).chat(QUESTION, allow_local=True)
        for out in ("of folder", "of pair")
    ]
    assert prompts[0].token_ids == prompts[1].token_ids
    pixels = [torch.from_numpy(normalized(prompt.images[0].image)) for prompt in prompts]
    assert torch.equal(*pixels)
    expected, actual = (tower.encode([pixels[0]])[0] for tower in towers if tower is not None)
    torch.testing.assert_close(actual, expected, atol=1e-2, rtol=1e-2)


def test_a_damaged_vision_tower_is_no_crash(files: Files, tmp_path: Path) -> None:
    """Whichever bytes of the header are others, it is read or refused."""
    content = files.mmproj.read_bytes()
    start = min(info.offset for info in read_header(files.mmproj).tensors.values())
    chance = random.Random(0)
    damaged_file, refused = tmp_path / "mmproj.gguf", 0
    for _ in range(100):
        damaged = bytearray(content)
        for _ in range(2):
            damaged[chance.randrange(4, start)] = chance.randrange(256)
        damaged_file.write_bytes(damaged)
        try:
            folder = make_pair(files.model, damaged_file)
            Checkpoint(folder, Description.read(folder).rename)
        except VLMServeError:
            refused += 1
    assert refused > 30


# Models in several parts


def test_a_model_in_several_parts_is_one(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "folder")
    whole = write_gguf(folder, tmp_path / "whole.gguf")
    first = write_gguf(folder, tmp_path / "model.gguf", part_tensors=12)
    assert first.name == "model-00001-of-00003.gguf"
    assert resolve_model(str(tmp_path / "model-00003-of-00003.gguf")) == first
    ours, expected = (load_model(path, LoadSettings(device=CPU, dtype=torch.float32)) for path in (first, whole))
    tokens = torch.arange(9)
    assert torch.equal(ours.language_model.embed(tokens), expected.language_model.embed(tokens))
    weights = ours.language_model.state_dict()
    assert weights.keys() == expected.language_model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.language_model.state_dict().items())
    before = identity(first)
    last = tmp_path / "model-00003-of-00003.gguf"
    last.write_bytes(last.read_bytes()[:-1] + b"\x01")
    assert identity(first) != before
    other = write_gguf(folder, tmp_path / "other.gguf", part_tensors=20)
    (tmp_path / "model-00002-of-00003.gguf").write_bytes(other.read_bytes())
    with pytest.raises(ModelLoadError, match="part 2 of 3: the parts of two models are mixed"):
        resolve_model(str(last))
    (tmp_path / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.gguf is missing beside it"):
        resolve_model(str(last))
    with pytest.raises(ModelLoadError, match="names must end in -00001-of-00003"):
        resolve_model(str(first.rename(tmp_path / "first.gguf")))


# Which files of many


REPOSITORY = [
    "README.md",
    "Model-BF16.gguf",
    "Model-Q4_K_M.gguf",
    "Model-Q4_K_S.gguf",
    "Model.Q8_0.gguf",
    "UD-Q4_K_XL/Model-UD-Q4_K_XL-00001-of-00002.gguf",
    "UD-Q4_K_XL/Model-UD-Q4_K_XL-00002-of-00002.gguf",
    "mmproj-BF16.gguf",
    "mmproj-F16.gguf",
    "mmproj-F32.gguf",
]


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [
        ("Q4_K_M", REPOSITORY[2:3]),
        ("q8_0", REPOSITORY[4:5]),
        ("BF16", REPOSITORY[1:2]),
        ("UD-Q4_K_XL", REPOSITORY[5:7]),
        ("Q4_K_XL", REPOSITORY[5:7]),
        ("Model-Q4_K_S.gguf", REPOSITORY[3:4]),
    ],
)
def test_files_are_chosen_by_their_names(wanted: str, parts: list[str]) -> None:
    assert choose_files(REPOSITORY, wanted, "owner/name") == Choice(tuple(parts), "mmproj-F16.gguf")


def test_the_vision_tower_is_the_nearest() -> None:
    paths = ["a/model-Q4_0.gguf", "a/mmproj-Q8_0.gguf", "b/mmproj-F16.gguf", "mmproj-F16.gguf"]
    assert choose_files(paths, "Q4_0", "name").mmproj == "a/mmproj-Q8_0.gguf"
    assert choose_files(paths[:1] + paths[2:], "Q4_0", "name").mmproj == "mmproj-F16.gguf"
    assert choose_files(paths[:1] + paths[2:3], None, "name").mmproj is None


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("Q4_K", r"no \.gguf file of a language model for 'Q4_K'; there is Model-BF16\.gguf, Model-Q4_K_M\.gguf"),
        (None, "several models that fit; there is Model-BF16"),
        ("F16", r"no \.gguf file of a language model for 'F16'"),
    ],
)
def test_ambiguous_mmproj_choices_are_rejected(wanted: str | None, words: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=words):
        choose_files(REPOSITORY, wanted, "owner/name")


@pytest.mark.parametrize("name", ["owner/name:Q4_0", "owner/name/Q4_0", "owner/name/Q4_0/model.gguf"])
def test_a_repository_has_both_files(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    paths = ["Q4_0/model.gguf", "Q8_0/model.gguf", "mmproj-f16.gguf"]
    downloaded: list[Any] = []

    def snapshot_download(repository: str, **options: Any) -> str:
        downloaded.append((repository, options["revision"], options["allow_patterns"]))
        (tmp_path / "Q4_0").mkdir(exist_ok=True)
        for path, file in zip((paths[0], paths[2]), files, strict=True):
            (tmp_path / path).unlink(missing_ok=True)
            (tmp_path / path).symlink_to(file)
        return str(tmp_path)

    class Hub:
        def list_repo_files(self, repository: str, revision: str | None) -> list[str]:
            return ["README.md", *paths]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert read_pair(resolve_model(name, "v1")) == (tmp_path / paths[0], tmp_path / paths[2])
    assert downloaded == [("owner/name", "v1", [paths[0], paths[2]])]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert read_pair(resolve_model(name, "v1")) == (tmp_path / paths[0], tmp_path / paths[2])
    assert downloaded[1:] == [("owner/name", "v1", ["*.gguf"])]


def unreachable(*arguments: Any, **options: Any) -> list[str]:
    raise httpx.ConnectError("no route")


def test_an_unreachable_hub_falls_back_to_cache(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model-Q4_0.gguf").symlink_to(files.model)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert resolve_model("owner/name:Q4_0") == tmp_path / "model-Q4_0.gguf"


def test_gguf_repositories_say_how_to_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: REPOSITORY)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(CheckpointNotFoundError, match=r"like owner/name:Q4_K_M; there are Model-BF16\.gguf"):
        resolve_model("owner/name")
