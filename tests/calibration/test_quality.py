"""How much a quantized model differs, beside transformers."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests.blip import CLASSES, BlipOracle
from tests.checkpoints import make_llama
from tests.normalized import normalized
from vlmserve.calibration import forward
from vlmserve.calibration.plot import Point, quality_plot
from vlmserve.calibration.quality import Comparison, quality_samples
from vlmserve.calibration.questions import read_questions
from vlmserve.calibration.samples import of_text
from vlmserve.cli import app
from vlmserve.errors import ConfigurationError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.models.hub import resolve_model
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.quantized import save_quantized
from vlmserve.models.registry import load_model
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import MediaConfig
from vlmserve.settings.quantization import QuantizationConfig
from vlmserve.types import Prompt

GROUPS_FIT: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


def load(folder: Path) -> LoadedModel:
    return load_model(folder, LoadSettings(device=torch.device("cpu"), dtype=torch.float32, kernels="torch"))


def test_all_figures_are_those_of_transformers(tmp_path: Path) -> None:
    folders = [make_llama(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    generator = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(torch.randint(0, 50, (length,), generator=generator).tolist()) for length in (700, 3, 900, 800, 1)
    ]
    done: list[tuple[int, int]] = []
    samples = [of_text(prompt) for prompt in prompts]
    quality = Comparison(load(folders[1]), samples).of(load(folders[0]), lambda *progress: done.append(progress))
    own, right, targets = [], [], []
    for prompt in prompts:
        for folder, rows in zip(folders, (own, right), strict=True):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            with torch.inference_mode():
                rows.append(model(input_ids=torch.tensor([prompt.token_ids])).logits[0, :-1].double().log_softmax(-1))
        targets += prompt.token_ids[1:]
    model, reference = torch.cat(own), torch.cat(right)
    places = torch.arange(len(targets)), torch.tensor(targets)
    assert quality.num_tokens == len(targets) == 2399
    assert quality.perplexity == pytest.approx(math.exp(-model[places].mean()), rel=1e-4)
    assert quality.reference_perplexity == pytest.approx(math.exp(-reference[places].mean()), rel=1e-4)
    divergence = torch.nn.functional.kl_div(model, reference, log_target=True, reduction="batchmean")
    assert quality.divergence == pytest.approx(float(divergence), rel=1e-3)
    assert quality.agreement == pytest.approx(
        float((model.argmax(-1) == reference.argmax(-1)).double().mean()), abs=2e-3
    )
    assert done[-1] == (2404, 2404)
    # Prompts are what is independent, and means are ratios of sums over them.
    lengths = [len(prompt.token_ids) - 1 for prompt in prompts]
    each = torch.nn.functional.kl_div(model, reference, log_target=True, reduction="none").sum(-1)
    for found, error in (
        (each, quality.divergence_error),
        (reference[places] - model[places], quality.change_error),
    ):
        rests = torch.stack([(part - found.mean()).sum() for part in found.split(lengths)])
        assert error == pytest.approx(float((rests.square().sum() * 5 / 4).sqrt()) / 2399, rel=1e-2)


def test_the_reference_is_computed_once(tmp_path: Path) -> None:
    folders = [make_llama(tmp_path / str(seed), seed=seed) for seed in (0, 1, 2)]
    reference, *others = map(load, folders)
    done: list[tuple[int, int]] = []
    comparison = Comparison(reference, [of_text(Prompt([1, 2, 3]))], lambda *progress: done.append(progress))
    assert done == [(3, 3)]
    reference.language_model.layers = torch.nn.ModuleList()
    found = [comparison.of(model) for model in others]
    assert found[0].reference_loss == found[1].reference_loss
    assert found[0].loss != found[1].loss
    assert found[0].divergence_error is None


def test_conversation_perplexity_equals_supervised_loss(tmp_path: Path) -> None:
    folders = [make_llama(tmp_path / str(seed), seed=seed, num_hidden_layers=1) for seed in (0, 1)]
    turns = [("user", "What is a cat?"), ("assistant", "An animal."), ("user", "Why?"), ("assistant", "It moves.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    file = tmp_path / "conversations.jsonl"
    file.write_text(json.dumps({"messages": messages}) + json.dumps({"prompt": "Hello", "answer": "No."}).join("\n\n"))
    preparer = RequestPreparer(folders[0], read_settings(MediaConfig, {}))
    quality = Comparison(load(folders[1]), quality_samples(preparer, 1000, file)).of(load(folders[0]))
    encode = AutoTokenizer.from_pretrained(folders[0]).encode
    total, count, model = 0.0, 0, AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float64)
    for said in (turns, [("user", "Hello"), ("assistant", "No.")]):
        ids: list[int] = []
        labels: list[int] = []
        for role, content in said:
            heading, words, end = (
                encode(text, add_special_tokens=False) for text in (f"{role}\n", f"{content}</s>", "\n")
            )
            ids += heading + words + end
            masked = [-100] * len(words) if role == "user" else words
            labels += [-100] * len(heading) + masked + [-100] * len(end)
        with torch.inference_mode():
            loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
        counted = sum(label >= 0 for label in labels)
        total, count = total + float(loss) * counted, count + counted
    assert quality.num_tokens == count
    assert quality.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)


def test_a_model_does_not_differ_from_itself() -> None:
    model = load(resolve_model("pixie"))
    samples = quality_samples(RequestPreparer(resolve_model("pixie"), read_settings(MediaConfig, {})), 400)
    quality = Comparison(model, samples).of(model)
    assert (quality.divergence, quality.agreement) == (0, 1)
    assert quality.perplexity == quality.reference_perplexity
    assert quality.num_tokens == sum(len(sample.counted) for sample in samples) > 0


def test_models_with_other_tokens_are_not_compared(tmp_path: Path) -> None:
    first, second = make_llama(tmp_path / "a"), make_llama(tmp_path / "b", vocab_size=60)
    with pytest.raises(ConfigurationError, match="different vocabularies"):
        Comparison(load(second), [of_text(Prompt([1, 2, 3]))]).of(load(first))


@pytest.mark.parametrize("kind", CLASSES)
def test_models_that_attend_to_images_are_compared(tmp_path: Path, kind: str) -> None:
    """Over answers to questions about drawn images, in more groups than one."""
    oracle = BlipOracle.make(tmp_path / "plain", kind)
    save_quantized(oracle.folder, tmp_path / "int8", QuantizationConfig(scheme="int8"))
    samples = quality_samples(RequestPreparer(oracle.folder, read_settings(MediaConfig, {})), 120)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "TOKENS_AT_ONCE", 60)
        quality = Comparison(load(oracle.folder), samples).of(load(tmp_path / "int8"))
    losses = []
    for sample in samples:
        cross, ids = sample.prompt.cross, sample.prompt.token_ids
        assert cross is not None
        with torch.inference_mode():
            states = oracle.model.vision_model(torch.from_numpy(normalized(cross.image))).last_hidden_state
            if cross.token_ids:
                asked = torch.tensor([cross.token_ids])
                states = oracle.model.text_encoder(asked, encoder_hidden_states=states).last_hidden_state
            predicted = oracle.model.text_decoder(torch.tensor([ids]), encoder_hidden_states=states).logits[0]
        losses += [-float(predicted[place - 1].log_softmax(-1)[ids[place]]) for place in sample.counted]
    assert quality.num_tokens == len(losses)
    assert quality.reference_loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert 0 < quality.divergence < 1


def test_a_question_without_an_answer_is_refused(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    with pytest.raises(ConfigurationError, match="line 2: needs an answer"):
        read_questions(questions)


def test_the_command_prints_a_table_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmserve.cli.quality.PROMPT", 100)
    monkeypatch.setattr("vlmserve.cli.quality.STEPS", 4)
    # Measured for seconds, and of no interest here.
    monkeypatch.setattr("vlmserve.tools.bench.product_rate", lambda device, dtype: 1.0)
    monkeypatch.setattr("vlmserve.tools.bench.memory_bandwidth", lambda device: 1.0)
    out = tmp_path / "small"
    save_quantized(resolve_model("pixie"), out, QuantizationConfig(scheme="int4"))
    line = ["eval", "quality", str(out), "--against", "pixie", "--tokens", "300"]
    result = CliRunner().invoke(app, line, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "same token" in result.stdout
    image = Image.new("RGB", (40, 40), "white")
    image.paste((255, 0, 0), (10, 10, 30, 30))
    image.save(tmp_path / "a.png")
    lines = [
        {"prompt": "What shape is it?", "images": ["a.png"], "answer": " Square."},
        {"messages": [{"role": "user", "content": "What is it?"}], "answer": "a cat", "max_tokens": 4},
    ]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, lines)))
    line += ["--questions", str(questions), "--per-task", "1"]
    drawing = tmp_path / "plot.svg"
    result = CliRunner().invoke(app, [*line, "--speed", "1", "--plot", str(drawing), "--json"])
    plain, small = json.loads(result.stdout)
    assert plain["quality"] is None
    assert plain["megabytes"] > 1.5 * small["megabytes"]
    assert small["quality"]["divergence"] > 0
    assert 0 <= small["core"] <= 1
    assert plain["right"] == small["right"] == 0.5
    assert min(small["prompt_rate"], small["answer_rate"], plain["prompt_rate"], plain["answer_rate"]) > 0
    assert drawing.read_text("utf-8").count("tokens a second") == 1


def test_plot_shows_each_model_once_per_panel() -> None:
    points = [Point("plain", 100, 0.0, 50.0), Point("a <b>", 40, 0.03, 90.0), Point("c", 41, 0.0301, 91.0)]
    for measured, panels in ((points, 2), ([Point(one.name, one.megabytes, one.divergence) for one in points], 1)):
        root = ElementTree.fromstring(quality_plot(measured, "t"))
        groups = root.findall("{*}g")
        assert len(groups) == panels
        for group, of in zip(groups, ("megabytes", "rate"), strict=False):
            circles = group.findall("{*}circle")
            across, down = ([float(circle.attrib[name]) for circle in circles] for name in ("cx", "cy"))
            values = [getattr(point, of) for point in points]
            # Proportional to the figures, from one corner.
            scale = (across[0] - across[1]) / (values[0] - values[1])
            assert (across[0] - across[2]) / (values[0] - values[2]) == pytest.approx(scale, rel=0.02)
            assert (down[0] - down[1]) / (down[0] - down[2]) == pytest.approx(0.03 / 0.0301, rel=0.02)
            labels = [text for text in group.findall("{*}text") if text.text in {"plain", "a <b>", "c"}]
            heights = sorted(float(label.attrib["y"]) for label in labels)
            assert len(heights) == 3
            assert min(after - before for before, after in pairwise(heights)) > 12
