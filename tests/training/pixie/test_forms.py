"""The recipe of forms: rows, the decoder by segments, and a run that resumes."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from tokenizers import Tokenizer

from training.pixie import forms, optimizer
from training.pixie.export import IMAGE_TOKENS, export
from training.pixie.form_rows import LENGTH, FormRowMaker, encode_given
from training.pixie.model import Decoder
from training.pixie.rows import pack
from training.pixie.segments import SegmentDecoder
from training.pixie.tokenizer import IMAGE
from vlmserve.models.hub import resolve_model
from vlmserve.pixie.forms import ask_form
from vlmserve.pixie.questions import Example
from vlmserve.pixie.scenes import sample_scene


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(resolve_model("pixie") / "tokenizer.json"))


def test_model_says_values_and_not_given_names(tokenizer):
    for seed in range(40):
        scene = sample_scene(seed)
        form = ask_form(scene, random.Random(seed))
        example = Example("form", (scene,), ((form.question, form.answer),))
        ids, said = encode_given(tokenizer, example, form.given)
        start = len(ids) - len(tokenizer.encode(form.answer).ids) - 1
        given = "".join(form.answer[begin:end] for begin, end in sorted(form.given))
        assert not any(said[:start])
        assert said[-1]
        assert (
            tokenizer.decode([one for one, is_said in zip(ids[start:], said[start:], strict=True) if not is_said])
            == given
        )


def test_segments_equal_whole_rows(tokenizer):
    maker = FormRowMaker(tokenizer)
    torch.manual_seed(0)
    rows, images = [], 0
    for seed in range(4):
        for groups, _ in maker.rows(maker.scenes(seed), random.Random(seed)):
            rows.append(pack(groups, LENGTH))
            images += int((rows[-1]["tokens"] == IMAGE).sum()) // IMAGE_TOKENS
    names = ("tokens", "positions", "groups", "branches", "said")
    tokens, positions, groups, branches, said = (
        torch.stack([torch.from_numpy(row[name]) for row in rows]) for name in names
    )
    decoder = Decoder()
    given = (tokens.long(), positions.long(), groups.long(), branches.long(), torch.randn(images, IMAGE_TOKENS, 192))
    with torch.no_grad():
        expected = decoder(*given, said)
        found = SegmentDecoder(decoder)(*given, said)
    assert len(found) == int(said.sum()) > 100
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_forms_are_taught_saved_and_exported(tmp_path, monkeypatch, tokenizer):
    export(tmp_path / "start", tokenizer=tokenizer)
    monkeypatch.setattr(optimizer, "MUON_ITERATIONS", 1)

    def run(steps: int) -> dict:
        arguments = ["--images", "64", "--skill-images", "2", "--batch", "2", "--skill-batch", "1"]
        arguments += ["--start", str(tmp_path / "start")]
        monkeypatch.setattr(sys, "argv", ["forms", "--out", str(tmp_path), "--steps", str(steps), *arguments])
        forms.main()
        return torch.load(tmp_path / "state.pt")

    first, second = run(1), run(2)
    assert (first["step"], second["step"]) == (1, 2)
    name = "blocks.0.q.weight"
    assert not torch.equal(first["decoder"]["originals"][name], second["decoder"]["originals"][name])
    assert (tmp_path / "export" / "model.safetensors").exists()


def test_adapters_change_the_decoder_as_peft_does(tokenizer):
    deltas = forms.adapter_deltas(forms.ADAPTERS / "corners")
    parameters = dict(Decoder().named_parameters())
    assert {name: delta.shape for name, delta in deltas.items()} == {
        name: parameters[name].shape for name in parameters if name.startswith("blocks.") and "norm" not in name
    }
    assert all(delta.abs().max() > 0 for delta in deltas.values())
