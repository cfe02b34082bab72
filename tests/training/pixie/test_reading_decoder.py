"""The decoder that reads: its batches, its modules beside transformers' and vlmserve's, and a run that resumes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

from training.pixie import optimizer
from training.pixie.export import export, new_model
from training.pixie.optimizer import Optimizer
from training.pixie.reading import train_decoder
from training.pixie.reading.decoder import ReadingDecoder, fit_merger, take_pixie
from training.pixie.reading.export import export_reading
from training.pixie.reading.labels import READING_LABELS
from training.pixie.reading.rows import (
    Sample,
    encode_question,
    fitted,
    flat_batch,
    sample_row,
    sample_skill_row,
    see,
    separate_images,
)
from training.pixie.reading.tower import WIDTH, ReadingHeads, ReadingTower
from training.pixie.reading.weights import load_part
from training.pixie.tokenizer import ASSISTANT, BOS, IMAGE, USER, encode_example
from vlmserve import LLM, SamplingParams
from vlmserve.models.hub import resolve_model
from vlmserve.pixie.evaluation import messages_of
from vlmserve.pixie.questions import sample_example
from vlmserve.pixie.reading import ReadingQuestion


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(resolve_model("pixie") / "tokenizer.json"))


@pytest.fixture(scope="module")
def modules() -> tuple[ReadingTower, ReadingDecoder]:
    """A tower and a decoder whose float32 weights are whole bfloat16 numbers."""
    torch.manual_seed(0)
    tower, decoder = ReadingTower(), ReadingDecoder()
    with torch.no_grad():
        for parameter in (*tower.parameters(), *decoder.parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.03)
            parameter.copy_(parameter.bfloat16())
    return tower, decoder


def test_answers_are_written_character_by_character(tokenizer):
    question = ReadingQuestion("total", "Total?", '{"total":"the 7"}', given=((0, 1), (2, 7)))
    ids, said = encode_question(tokenizer, question)
    spoken = [tokenizer.decode([token]) for token, speaks in zip(ids, said, strict=True) if speaks]
    assert "".join(spoken) == '"":"the 7"}'
    assert len(spoken) == len('"":"the 7"}') + 1
    assert tokenizer.decode(ids).endswith('{"total":"the 7"}')


@pytest.mark.parametrize(("seed", "documents", "count"), [(5, 1, 1), (8, 0, 2)])
def test_modules_equal_transformers_on_the_export(tmp_path, tokenizer, modules, seed, documents, count):
    tower, decoder = modules
    export_reading(tmp_path, tower.state_dict(), decoder.state_dict(), tokenizer)
    theirs = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    sample, images, _ = sample_row(seed, tokenizer, documents=documents)
    assert len(images) == count
    common, branches = sample.groups[0]
    batch = flat_batch([Sample(sample.grids, sample.shown, [(common, branches[:1])])], torch.float32)
    pixels = []
    for image, (rows, columns) in zip(images, sample.grids, strict=True):
        patches = torch.from_numpy(image.copy()).float().div(127.5).sub(1).view(rows, 16, columns, 16, 3)
        patches = patches.permute(0, 2, 4, 1, 3).reshape(rows * columns, 3, 1, 16, 16)
        pixels.append(patches.expand(-1, -1, 2, -1, -1).reshape(rows * columns, -1))
    with torch.no_grad():
        features = torch.cat(see(tower, images))
        ours = decoder(batch.tokens, batch.positions, batch.flat, features, torch.ones_like(batch.said))
        expected = theirs(
            input_ids=batch.tokens[None],
            mm_token_type_ids=(batch.tokens == IMAGE).int()[None],
            pixel_values=torch.cat(pixels),
            image_grid_thw=torch.tensor([[1, *grid] for grid in sample.grids]),
        ).logits[0]
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=1e-3)


def test_images_are_encoded_as_the_template_writes_them(tmp_path, tokenizer, modules):
    export_reading(tmp_path, modules[0].state_dict(), modules[1].state_dict(), tokenizer)
    written = AutoTokenizer.from_pretrained(tmp_path)
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    for seed in range(3):
        example = sample_example(seed, "pair")
        ids, said = separate_images(encode_example(tokenizer, example), newline)
        assert len(ids) == len(said)
        messages = messages_of(example)
        expected = written.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids[: len(expected)] == expected


def test_vlmserve_serves_the_export(tmp_path, tokenizer, modules):
    tower, decoder = modules
    export_reading(tmp_path, tower.state_dict(), decoder.state_dict(), tokenizer)
    image = np.random.default_rng(0).integers(0, 255, (160, 240, 3), np.uint8)
    question = tokenizer.encode("Read it.", add_special_tokens=False).ids
    group = [BOS, USER, IMAGE], [([*question, ASSISTANT], [False] * len(question) + [True])]
    batch = flat_batch([Sample(((10, 15),), (0,), [group])], torch.float32)
    with torch.no_grad():
        features = torch.cat(see(tower, [image]))
        logits = decoder(batch.tokens, batch.positions, batch.flat, features, torch.ones_like(batch.said))
    content = [{"type": "image", "image": Image.fromarray(image)}, {"type": "text", "text": "Read it."}]
    llm = LLM(str(tmp_path), dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=1)
    answer = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)[0]
    assert len(answer.prompt_token_ids) == len(batch.tokens)
    assert answer.outputs[0].token_ids == [int(logits[-1].argmax())]


@pytest.mark.parametrize(("seed", "documents", "images"), [(2, 1, 1), (3, 0, 1), (8, 0, 2)])
def test_branches_do_not_see_each_other(tokenizer, modules, seed, documents, images):
    _, decoder = modules
    sample, pictures, labels = sample_row(seed, tokenizer, documents=documents)
    assert len(pictures) == len(sample.grids) == images
    assert [one.shape for one in labels] == [(len(READING_LABELS), rows * columns) for rows, columns in sample.grids]
    features = [torch.randn(rows * columns, WIDTH) for rows, columns in sample.grids]
    apart = []
    left = list(sample.shown)
    with torch.no_grad():

        def answer(one: Sample) -> Tensor:
            batch = flat_batch([one], torch.float32)
            assert len(batch.tokens) == one.length
            shown = torch.cat([features[image] for image in one.shown])
            return decoder(batch.tokens, batch.positions, batch.flat, shown, batch.said)

        joint = answer(sample)
        for common, branches in sample.groups:
            count = common.count(IMAGE)
            shared, left = left[:count], left[count:]
            for branch in branches:
                own = branch[0].count(IMAGE)
                apart.append(answer(Sample(sample.grids, (*shared, *left[:own]), [(common, [branch])])))
                left = left[own:]
    torch.testing.assert_close(joint, torch.cat(apart), atol=1e-4, rtol=1e-4)


def test_images_fit_as_the_processor_resizes_them(tmp_path, tokenizer, modules):
    export_reading(tmp_path, modules[0].state_dict(), modules[1].state_dict(), tokenizer)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    for size in ((20, 30), (96, 96), (150, 130), (203, 397), (448, 448), (900, 1000), (1000, 160)):
        image = Image.fromarray(np.random.default_rng(1).integers(0, 255, (size[1], size[0], 3), np.uint8))
        grid = processor(image, return_tensors="pt")["image_grid_thw"][0].tolist()
        assert fitted(image).shape == (16 * grid[1], 16 * grid[2], 3)


def test_adapters_get_samples_of_their_own(tokenizer):
    sample, images, _ = sample_skill_row(7, "german", tokenizer)
    ((common, branches),) = sample.groups
    assert common.count(IMAGE) == len(images) == 1
    assert len(branches) > 1
    assert all(any(said) for _, said in branches)


def test_the_merger_learns_what_is_wanted():
    torch.manual_seed(0)
    decoder = ReadingDecoder()
    features = torch.randn(2000, WIDTH)
    wanted = torch.tanh(features @ torch.randn(WIDTH, 256) * 0.05)
    error = fit_merger(decoder, features, wanted)
    with torch.no_grad():
        reached = (decoder.project(features) - wanted).pow(2).mean() / wanted.var(0).mean()
    assert error == pytest.approx(float(reached), rel=0.05)
    assert error < 0.5


def test_decoder_runs_resume_export_and_start_others(tmp_path, monkeypatch, tokenizer):
    export(tmp_path / "pixie", tokenizer=tokenizer)
    monkeypatch.setattr(optimizer, "MUON_ITERATIONS", 0)
    parts = {"tower": Optimizer(ReadingTower(), 0.1), "heads": Optimizer(ReadingHeads(), 0.1)}
    first, later = tmp_path / "first", tmp_path / "later"
    first.mkdir()
    later.mkdir()
    torch.save({"step": 0} | {name: part.state_dict() for name, part in parts.items()}, first / "tower.pt")

    def run(out: Path, steps: int, *more: str) -> dict[str, Any]:
        arguments = ["--out", str(out), "--steps", str(steps), "--tokens", "300", "--first-rows", "2", *more]
        arguments += ["--drawn-rows", "1", "--fitted", "8", "--skill-rows", "1", "--skill-batch", "1"]
        arguments += ["--pixie", str(tmp_path / "pixie")]
        monkeypatch.setattr(sys, "argv", ["train_decoder", *arguments])
        train_decoder.main()
        return torch.load(out / "decoder.pt")

    states = run(first, 1), run(first, 2)
    assert [state["step"] for state in states] == [1, 2]
    assert not torch.equal(*(state["decoder"]["originals"]["embeddings.weight"] for state in states))
    assert (first / "export" / "model.safetensors").stat().st_size < 25e6
    weights = first / "weights.safetensors"
    for name, part in parts.items():
        changed = [
            not torch.equal(one, part.averages[key].bfloat16())
            for key, one in load_part(weights, name)["averages"].items()
        ]
        assert any(changed), f"the {name} learns too"
    run(later, 0, "--start", str(weights))
    exports = [load_file(out / "export" / "model.safetensors") for out in (first, later)]
    assert all(torch.equal(tensor, exports[1][name]) for name, tensor in exports[0].items())


def test_runs_need_a_tower(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_decoder", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="run train_tower first"):
        train_decoder.main()
    save_file({"tower.x": torch.zeros(1)}, tmp_path / "some.safetensors")
    with pytest.raises(ValueError, match="no weights of the heads"):
        load_part(tmp_path / "some.safetensors", "heads")


def test_the_decoder_starts_from_pixie():
    decoder = ReadingDecoder()
    weights = new_model().state_dict()
    take_pixie(decoder, weights)
    expected = weights["model.language_model.layers.2.mlp.up_proj.weight"]
    assert torch.equal(decoder.blocks[2].up.weight, expected.float())
