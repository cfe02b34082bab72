"""BLIP's parts against transformers, in float32, under the names that checkpoints have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BlipForConditionalGeneration

from tests.blip import CLASSES, FEATURES, TEXT, BlipOracle, make_blip
from tests.checkpoints import change_config, change_tensors
from tests.normalized import normalized
from tests.paged import PagedRun
from vlmserve.errors import MissingWeightsError, ModelLoadError, UnsupportedModelError
from vlmserve.models.decoder import Decoder
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.quantized import save_quantized
from vlmserve.models.registry import load_model
from vlmserve.settings.quantization import QuantizationConfig

pytestmark = pytest.mark.usefixtures("kernels")


def load(folder: Path) -> LoadedModel:
    return load_model(folder, LoadSettings(device=torch.device("cpu"), dtype=torch.float32))


@pytest.fixture(scope="module", params=CLASSES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BlipOracle:
    return BlipOracle.make(tmp_path_factory.mktemp("blip"), request.param)


@torch.inference_mode()
def test_images_and_cross_states_equal_transformers(oracle: BlipOracle) -> None:
    ours, theirs = load(oracle.folder), oracle.model
    assert ours.vision is not None
    assert ours.cross is not None
    images = [torch.from_numpy(normalized(oracle.make_image(seed))) for seed in range(3)]
    features = ours.vision.encode(images)
    expected = theirs.vision_model(torch.cat(images)).last_hidden_state
    torch.testing.assert_close(torch.stack(features), expected, atol=1e-5, rtol=1e-5)
    texts = [[], [], []] if oracle.kind == "caption" else [[2, 40, 50, 3], [2, 9, 3], [2, 9, 41, 42, 43, 8, 9, 3]]
    states = ours.cross.encode(features, texts)
    for image, text, made in zip(expected, texts, states, strict=True):
        seen = image[None]
        if text:
            seen = theirs.text_encoder(torch.tensor([text]), encoder_hidden_states=seen).last_hidden_state
        for layer, (keys, values) in zip(theirs.text_decoder.bert.encoder.layer, made, strict=True):
            attention = layer.crossattention.self
            for part, projection in ((keys, attention.key), (values, attention.value)):
                whole = projection(seen)[0].view(seen.shape[1], TEXT["num_attention_heads"], -1).transpose(0, 1)
                torch.testing.assert_close(part, whole, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_logits_equal_those_of_transformers(oracle: BlipOracle) -> None:
    """Of several sequences that attend to different states, in one batch and in chunks."""
    ours, theirs = load(oracle.folder), oracle.model
    assert ours.vision is not None
    assert ours.cross is not None
    decoder = ours.language_model
    features = ours.vision.encode([torch.from_numpy(normalized(oracle.make_image(seed))) for seed in range(3)])
    texts = [[], [], []] if oracle.kind == "caption" else [[2, 40, 50, 3], [2, 9, 3], [2, 9, 41, 42, 43, 8, 9, 3]]
    states = ours.cross.encode(features, texts)
    sequences = [torch.randint(5, TEXT["vocab_size"], (length,)) for length in (21, 4, 13)]
    run = PagedRun(decoder, [decoder.embed(ids) for ids in sequences], cross_states=states)
    logits = run.finish([5, 1, 4])
    for seed, (text, ids, actual) in enumerate(zip(texts, sequences, logits, strict=True)):
        seen = theirs.vision_model(torch.from_numpy(normalized(oracle.make_image(seed)))).last_hidden_state
        if text:
            seen = theirs.text_encoder(torch.tensor([text]), encoder_hidden_states=seen).last_hidden_state
        expected = theirs.text_decoder(ids[None], encoder_hidden_states=seen).logits[0]
        assert expected.abs().max() > 1
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_the_large_shape_loads(tmp_path: Path) -> None:
    """Its tower is wider than its decoder."""
    folder = make_blip(tmp_path, "caption", hidden_size=64, num_attention_heads=8)
    theirs = BlipForConditionalGeneration.from_pretrained(folder).eval()
    ours = load(folder)
    assert ours.vision is not None
    assert ours.cross is not None
    pixels = torch.randn(1, 3, 24, 24)
    features = ours.vision.encode([pixels])
    assert features[0].shape == (FEATURES, 64)
    layer = theirs.text_decoder.bert.encoder.layer[1].crossattention.self
    with torch.inference_mode():
        expected = layer.value(theirs.vision_model(pixels).last_hidden_state)[0]
        actual = ours.cross.encode(features, [[]])[0][1, 1].transpose(0, 1).flatten(1)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_the_heads_bias_is_added(tmp_path: Path) -> None:
    """Published files hold head and embeddings, equal ones, and fine-tuned ones need not be equal."""
    folder = make_blip(tmp_path)
    plain = load(folder)

    def raise_bias(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        return name, tensor + name.endswith("cls.predictions.bias")

    change_tensors(folder, raise_bias)
    hidden = torch.randn(2, TEXT["hidden_size"])
    shifted = load(folder).language_model.logits(hidden)
    torch.testing.assert_close(shifted, plain.language_model.logits(hidden) + 1, atol=1e-4, rtol=1e-4)
    head = torch.randn(TEXT["vocab_size"], TEXT["hidden_size"])
    path = folder / "model.safetensors"
    stored = {**load_file(path), "text_decoder.cls.predictions.decoder.weight": head}
    save_file(stored, path, metadata={"format": "pt"})
    own = load(folder).language_model
    assert isinstance(own, Decoder)
    assert own.head_transform is not None
    with torch.inference_mode():
        expected = own.head_transform(hidden) @ head.T + stored["text_decoder.cls.predictions.bias"]
        torch.testing.assert_close(own.logits(hidden), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_checkpoint_may_be_quantized(oracle: BlipOracle, tmp_path: Path) -> None:
    """What is rounded when it is written is what is rounded when it is loaded, cross attention's parts included."""
    settings = QuantizationConfig(scheme="int8", vision=True)
    save_quantized(oracle.folder, tmp_path / "int8", settings)
    pixels = torch.from_numpy(normalized(oracle.make_image(0)))
    made = []
    for folder, quantization in ((oracle.folder, settings), (tmp_path / "int8", None), (oracle.folder, None)):
        model = load_model(
            folder, LoadSettings(device=torch.device("cpu"), dtype=torch.float32, quantization=quantization)
        )
        assert model.vision is not None
        assert model.cross is not None
        text = [] if oracle.kind == "caption" else [2, 40, 50, 3]
        made.append(model.cross.encode(model.vision.encode([pixels]), [text])[0])
    torch.testing.assert_close(made[0], made[1], atol=1e-4, rtol=1e-4)
    assert 0 < (made[0] - made[2]).abs().mean() < 0.1 * made[2].abs().mean()


@pytest.mark.parametrize(
    ("fields", "error", "word"),
    [
        ({"vision_config": {"model_type": "clip_vision_model"}}, UnsupportedModelError, "clip_vision_model"),
        ({"text_config": {**TEXT, "model_type": "t5"}}, UnsupportedModelError, "t5"),
        ({"text_config": {**TEXT, "hidden_act": "mish"}}, UnsupportedModelError, "mish"),
        ({"text_config": {**TEXT, "num_attention_heads": 5}}, ModelLoadError, "5 attention heads"),
        ({"architectures": ["BlipForImageTextRetrieval"]}, UnsupportedModelError, "BlipForImageTextRetrieval"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, fields, error, word) -> None:
    folder = make_blip(tmp_path)
    change_config(folder, **fields)
    with pytest.raises(error, match=word):
        load(folder)


def test_a_decoder_without_cross_attention_is_rejected(tmp_path: Path) -> None:
    folder = make_blip(tmp_path, "question")
    change_config(folder, vision_config={"hidden_size": 32, "num_attention_heads": 4, "image_size": 24})
    with pytest.raises(ModelLoadError, match="states of 32 elements"):
        load(folder)


def test_a_missing_question_encoder_is_rejected(tmp_path: Path) -> None:
    folder = make_blip(tmp_path, "caption", hidden_size=48)
    change_config(folder, architectures=["BlipForQuestionAnswering"])
    with pytest.raises(MissingWeightsError, match="text_encoder"):
        load(folder)
