"""Teach pixie forms and calls of functions: python -m training.pixie.forms --out runs/forms

Starts from the export of `training.pixie.train`. The vision tower stays as it is, and sees each image once, before.
Pixie's other questions are asked again, and the adapters' questions with the frozen adapters, so that both stay right.
The state is saved every few minutes; the same command resumes.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.func import functional_call

from training.pixie.export import export, load_llava
from training.pixie.form_rows import Rows, make_rows, make_skill_rows
from training.pixie.model import Decoder, Tower, hugging_face_names, take_weights
from training.pixie.optimizer import Optimizer
from training.pixie.precision import parameter_dtype
from training.pixie.segments import SegmentDecoder
from training.pixie.skills import SKILLS
from vlmserve.models.hub import resolve_model

RATE = 1.2e-3
WARM_UP_STEPS = 40
AVERAGE_DECAY = 0.99
SAVE_SECONDS = 180.0
SHOW_EVERY: Final = 25
ADAPTERS: Final = Path(__file__).parents[2] / "src" / "vlmserve" / "pixie" / "adapters"
_LORA_NAMES: Final = {"self_attn.": "", "mlp.": "", "_proj": ""}

console = Console()


def adapter_deltas(folder: Path) -> dict[str, Tensor]:
    """What a LoRA adapter adds to the weights of `Decoder`, by their names."""
    tensors = load_file(folder / "adapter_model.safetensors")
    deltas = {}
    for name, first in tensors.items():
        if not name.endswith("lora_A.weight"):
            continue
        second = tensors[name.replace("lora_A", "lora_B")]
        own = name.partition("layers.")[2].removesuffix(".lora_A.weight")
        for theirs, ours in _LORA_NAMES.items():
            own = own.replace(theirs, ours)
        deltas[f"blocks.{own}.weight"] = 2 * second.float() @ first.float()
    return deltas


class Stage:
    """The decoder under training, its rows, and the state in a folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.tokenizer = Tokenizer.from_file(str(resolve_model("pixie") / "tokenizer.json"))
        self.tower, self.decoder = Tower(), Decoder()
        take_weights(self.tower, self.decoder, load_llava(options.start).state_dict())
        self.dtype = parameter_dtype(torch.device("cpu"))
        self.tower.to(self.dtype)
        self.rows = self._rows("rows.pt", options.images, None)
        self.skill_rows = {skill: self._rows(f"{skill}.pt", options.skill_images, skill) for skill in SKILLS}
        self.deltas = {
            skill: {name: delta.to(self.dtype) for name, delta in adapter_deltas(ADAPTERS / skill).items()}
            for skill in SKILLS
        }
        self.model = SegmentDecoder(self.decoder)
        self.optimizer = Optimizer(self.decoder, options.rate)
        self.step = 0
        if (self.out / "state.pt").exists():
            state = torch.load(self.out / "state.pt")
            self.step = state["step"]
            self.optimizer.load_state_dict(state["decoder"])

    def _rows(self, name: str, count: int, skill: str | None) -> Rows:
        path = self.out / name
        if not path.exists():
            with console.status(f"Drawing images: {name}") as status:
                if skill is None:
                    show = lambda done: status.update(f"Drawing images: {done} of {count}")  # noqa: E731
                    make_rows(self.tokenizer, self.tower, count, show).save(path)
                else:
                    make_skill_rows(self.tokenizer, self.tower, skill, count).save(path)
        return Rows.load(path)

    def save(self) -> None:
        partial = self.out / "state.tmp"
        torch.save({"step": self.step, "decoder": self.optimizer.state_dict()}, partial)
        os.replace(partial, self.out / "state.pt")

    def loss(self, rows: Rows, indices: Any, delta: dict[str, Tensor] | None = None) -> tuple[Tensor, float]:
        """The loss of rows, with an adapter if there is a `delta`, and the share of tokens that are right."""
        taken, features, said = rows.batch(indices)
        tokens = taken[0]
        said = F.pad(said[:, 1:], (0, 1))
        targets = F.pad(tokens[:, 1:], (0, 1))[said]
        changed = {
            f"decoder.{name}": parameter + delta[name]
            for name, parameter in self.decoder.named_parameters()
            if delta is not None and name in delta
        }
        logits = functional_call(self.model, changed, (*taken, features.to(self.dtype), said))
        right = float((logits.argmax(-1) == targets).float().mean())
        return F.cross_entropy(logits.float(), targets), right

    def export(self) -> Path:
        """Write the averaged weights as a Hugging Face folder."""
        weights = hugging_face_names(self.tower.state_dict(), self.optimizer.averages)
        export(self.out / "export", weights, self.tokenizer)
        return self.out / "export"


def train(stage: Stage, options: argparse.Namespace) -> None:
    started = saved = time.monotonic()
    shown: list[float] = []
    names = tuple(SKILLS)
    for step in range(stage.step, options.steps):
        random = np.random.default_rng((3, step))
        losses = []
        for _ in range(options.parts):
            loss, right = stage.loss(stage.rows, random.integers(0, len(stage.rows), options.batch // options.parts))
            (loss / options.parts).backward()
            losses.append((loss.item(), right))
        loss_mean, right_mean = np.mean(losses, 0)
        skill = names[step % len(names)]
        rows = stage.skill_rows[skill]
        skill_loss, skill_right = stage.loss(
            rows, random.integers(0, len(rows), options.skill_batch), stage.deltas[skill]
        )
        (skill_loss * options.skill_batch / options.batch).backward()
        scale = min(1.0, (step + 1) / WARM_UP_STEPS, (options.steps - step) / (options.steps * options.decay))
        stage.optimizer.step(scale, min(AVERAGE_DECAY, (step + 1) / (step + 10)))
        stage.step = step + 1
        new = [loss_mean, right_mean, skill_loss.item(), skill_right]
        shown = [0.96 * old + 0.04 * value for old, value in zip(shown or new, new, strict=True)]
        if stage.step % SHOW_EVERY == 0 or stage.step == options.steps:
            loss_, right_, skill_, skill_right_ = shown
            console.print(
                f"{stage.step} of {options.steps} steps: loss {loss_:.3f}, right {right_:.2%}, with adapters "
                f"{skill_:.3f}, {skill_right_:.2%}; {time.monotonic() - started:.0f} s", highlight=False, soft_wrap=True
            )  # fmt: skip
        if time.monotonic() - saved > SAVE_SECONDS or stage.step == options.steps:
            stage.save()
            stage.export()
            saved = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.pixie.forms", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "runs" / "forms")
    parser.add_argument(
        "--start", type=Path, default=Path(__file__).parent / "runs" / "export", help="the folder to start from"
    )
    parser.add_argument("--images", type=int, default=16000, help="images to ask about, with three rows each")
    parser.add_argument("--skill-images", type=int, default=900, help="images for each adapter")
    parser.add_argument("--steps", type=int, default=5600)
    parser.add_argument("--batch", type=int, default=16, help="rows of a step")
    parser.add_argument("--parts", type=int, default=2, help="in which a step computes its rows, to fit caches")
    parser.add_argument("--skill-batch", type=int, default=2, help="and rows of an adapter's questions")
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate")
    parser.add_argument("--decay", type=float, default=0.6, help="last share of the steps in which the rate falls")
    options = parser.parse_args()
    stage = Stage(options)
    train(stage, options)
    console.print(f"Done: {stage.export()}")


if __name__ == "__main__":
    main()
