"""Which adapters tokens were routed to, as figures and as a plot."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

from tests.checkpoints import make_llava
from tests.peft_adapters import make_adapter, make_xlora
from vlmserve.cli import app
from vlmserve.errors import ConfigurationError
from vlmserve.settings.config import EngineConfig
from vlmserve.tools.routing import Routing, RoutingRecorder

TARGETS = r".*language_model.*(q|v)_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routing")
    make_llava(folder / "base", max_position_embeddings=2048)
    base = AutoModelForImageTextToText.from_pretrained(folder / "base", dtype=torch.float32).eval()
    adapters = [{"target_modules": TARGETS}] * 3
    model = make_xlora(base, folder / "mixed", adapters, xlora_depth=2, layerwise_scalings=True)
    make_adapter(base, folder / "plain", target_modules=TARGETS)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (42, 42, 3), np.uint8)).save(folder / "image.png")
    return folder, model


def test_scalings_of_all_tokens_are_those_of_peft(checkpoint):
    folder, model = checkpoint
    config = EngineConfig(model=str(folder / "base"), dtype="float32", device="cpu", kv_cache_memory="8MiB")
    router = RoutingRecorder(config, folder / "mixed")
    content = [{"type": "image", "image": str(folder / "image.png")}, {"type": "text", "text": "How many?"}]
    routing = router.route([{"role": "user", "content": content}], 5)
    assert routing.adapters == ["0", "1", "2"]
    assert routing.kinds.count("image") == 9
    assert routing.kinds[-4:] == ["answer"] * 4, "nothing is computed of the last token"
    text = router.route([{"role": "user", "content": "How many?"}], 2)
    prompt = router.preparer.chat([{"role": "user", "content": "How many?"}], allow_local=True)
    with torch.inference_mode():
        model(input_ids=torch.tensor([prompt.token_ids]))
    expected = model.base_model.internal_xlora_scalings[0].mean(1)
    assert torch.allclose(torch.tensor(text.scalings[: len(prompt.token_ids)]), expected, atol=1e-5)
    assert [part.kind for part in routing.parts()] == list(dict.fromkeys(routing.kinds))


def test_the_plot_has_all_adapters_and_tokens():
    routing = Routing(["a<b", "c"], ["x", "i", "i", "&"], ["prompt", "image", "image", "answer"],
                      [[0.2, 0.8], [0.5, 0.5], [0.7, 0.3], [-0.1, 1.1]], "&")  # fmt: skip
    root = ElementTree.fromstring(routing.to_svg())
    cells = [cell for cell in root.iter("{http://www.w3.org/2000/svg}rect") if cell.get("fill-opacity")]
    assert len(cells) == 2 * 3, "an image is one column"
    shown = {cell[0].text for cell in cells}
    assert "image, 2 tokens (image): a<b 0.600" in shown
    assert "& (answer): c 1.100" in shown
    assert routing.parts()[1].means == pytest.approx([0.6, 0.4])


def test_the_command_writes_table_and_plot(checkpoint, tmp_path):
    folder, _ = checkpoint
    options = ["--model", str(folder / "base"), "--device", "cpu", "--dtype", "float32", "--tokens", "3"]
    where = ["--image", str(folder / "image.png"), "--plot", str(tmp_path / "plot.svg")]
    result = CliRunner().invoke(app, ["eval", "routing", str(folder / "mixed"), "How many?", *options, *where])
    assert result.exit_code == 0, result.output
    assert "| image | 9 |" in result.output
    ElementTree.parse(tmp_path / "plot.svg")


def test_an_adapter_that_mixes_nothing_is_refused(checkpoint):
    folder, _ = checkpoint
    config = EngineConfig(model=str(folder / "base"), dtype="float32", device="cpu", kv_cache_memory="8MiB")
    with pytest.raises(ConfigurationError, match="mixes no adapters"):
        RoutingRecorder(config, folder / "plain")
