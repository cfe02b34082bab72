"""Teach the decoder to read: python -m training.pixie.reading.train_decoder --out runs/reading

Starts from pixie's language model and the tower of `train_tower`, which does not change. The tower encodes each image
once. Questions about scenes, forms and calls of functions are asked again, and the adapters' questions with the frozen
adapters, so that all of them stay right. The state is saved every few minutes; the same command resumes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor
from torch.func import functional_call

from training.pixie.adapters import base_model
from training.pixie.forms import ADAPTERS, adapter_deltas
from training.pixie.model import Decoder, Tower, take_weights
from training.pixie.optimizer import Optimizer
from training.pixie.precision import parameter_dtype
from training.pixie.reading.decoder import ReadingDecoder, fit_merger, take_pixie
from training.pixie.reading.export import export_reading
from training.pixie.reading.rows import Drawn, Sample, flat_batch, sample_row, sample_skill_row, see
from training.pixie.reading.tower import WIDTH, ReadingTower
from training.pixie.reading.weights import load_part, save_parts
from training.pixie.rows import squash
from training.pixie.skills import SKILLS
from vlmserve.models.hub import resolve_model
from vlmserve.pixie.drawing import draw_scene
from vlmserve.pixie.scenes import sample_scene

RATE: Final = 1.5e-3
STEPS: Final = 4000
WARM_UP_STEPS: Final = 40
AVERAGE_DECAY: Final = 0.99
SAVE_SECONDS: Final = 150.0
SHOW_EVERY: Final = 20
SKILL_SHARE: Final = 0.12
"""Weight of the loss of adapters' questions."""
SKILL_SEED: Final = 180_000_000
SIDE_OF_SCENES: Final = 144
"""Pixels; as many patches along a side as pixie's own images have."""
FIRST_SEED: Final = 12_000_000_000
"""Rows from here on are in no other stage."""

Seen = tuple[Sample, list[Tensor]]
"""A sample and the features of its images."""

console = Console()


class DecoderRun:
    """The decoder under training, rows with the features of their images, and the state in a folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out: Path = options.out
        torch.manual_seed(options.seed)
        self.options = options
        self.tokenizer = Tokenizer.from_file(str(resolve_model("pixie") / "tokenizer.json"))
        self.dtype = parameter_dtype(torch.device("cpu"))
        self.tower, self.decoder = ReadingTower(), ReadingDecoder()
        trained = torch.load(self.out / "tower.pt") if (self.out / "tower.pt").exists() else None
        self.seeing = {
            name: (trained[name] if trained else load_part(self._start_file(), name))["averages"]
            for name in ("tower", "heads")
        }
        """Weights of the tower and its heads, which do not change."""
        self.tower.load_state_dict(self.seeing["tower"])
        self.tower.to(self.dtype)
        state = torch.load(self.out / "decoder.pt") if (self.out / "decoder.pt").exists() else None
        if state is None and options.start is None:
            self._start()
        self.optimizer = Optimizer(self.decoder, options.rate)
        self.step = 0
        if state is not None:
            self.step = state["step"]
            self.optimizer.load_state_dict(state["decoder"])
        elif options.start is not None:
            self.optimizer.load_state_dict(load_part(options.start, "decoder"))
        self.samples: list[Seen] = []
        self.drawn = 0
        self.skill_samples = {
            skill: self._seen(
                [sample_skill_row(SKILL_SEED + n, skill, self.tokenizer) for n in range(options.skill_rows)]
            )
            for skill in SKILLS
        }
        self.deltas = {
            skill: {name: delta.to(self.dtype) for name, delta in adapter_deltas(ADAPTERS / skill).items()}
            for skill in SKILLS
        }

    def _start_file(self) -> Path:
        if self.options.start is None:
            raise SystemExit(f"{self.out} has no tower.pt: run train_tower first, or pass --start weights.safetensors")
        start: Path = self.options.start
        return start

    def _start(self) -> None:
        """Start from pixie, with a merger that shows scenes as pixie's own tower does."""
        pixie = base_model().state_dict()
        take_pixie(self.decoder, pixie)
        tower, decoder = Tower(), Decoder()
        take_weights(tower, decoder, pixie)
        scenes = [sample_scene(FIRST_SEED + index) for index in range(self.options.fitted)]
        small = torch.from_numpy(np.stack([squash(scene) for scene in scenes]))
        size = SIDE_OF_SCENES, SIDE_OF_SCENES
        large = [np.asarray(draw_scene(scene).resize(size, Image.Resampling.BICUBIC)) for scene in scenes]
        with torch.inference_mode():
            wanted = decoder.project(tower(small)).flatten(0, 1).clone()
        error = fit_merger(self.decoder, torch.cat(see(self.tower, large)), wanted)
        console.print(f"merger: relative error {error:.2f}", highlight=False)

    def draw(self, count: int) -> None:
        """Draw samples and encode their images; the oldest go if there are more than enough."""
        first = FIRST_SEED + (self.step + self.drawn + 1) * 1_000_003
        self.samples += self._seen([sample_row(first + index, self.tokenizer) for index in range(count)])
        self.drawn += count
        del self.samples[: -self.options.rows]

    def _seen(self, drawn: Sequence[Drawn]) -> list[Seen]:
        features = iter(see(self.tower, [image for one in drawn for image in one.images]))
        return [(one.sample, [next(features) for _ in one.images]) for one in drawn]

    def save(self) -> None:
        partial = self.out / "decoder.tmp"
        torch.save({"step": self.step, "decoder": self.optimizer.state_dict()}, partial)
        os.replace(partial, self.out / "decoder.pt")

    def batch(self, random: np.random.Generator) -> list[Seen]:
        """Random samples of about as many tokens as a step computes."""
        chosen: list[Seen] = []
        left = self.options.tokens
        while left > 0:
            chosen.append(self.samples[random.integers(len(self.samples))])
            left -= chosen[-1][0].length
        return chosen

    def loss(self, chosen: Sequence[Seen], delta: Mapping[str, Tensor] | None = None) -> tuple[Tensor, float]:
        """The loss of samples, with an adapter if there is a `delta`, and the share of tokens that are right."""
        batch = flat_batch([sample for sample, _ in chosen], self.dtype)
        shown = [features[image] for sample, features in chosen for image in sample.shown]
        features = torch.cat(shown) if shown else torch.empty(0, WIDTH, dtype=self.dtype)
        changed = {
            name: parameter + delta[name]
            for name, parameter in self.decoder.named_parameters()
            if delta is not None and name in delta
        }
        arguments = batch.tokens, batch.positions, batch.flat, features, batch.said
        logits = functional_call(self.decoder, changed, arguments)
        right = float((logits.argmax(-1) == batch.targets).float().mean())
        return F.cross_entropy(logits.float(), batch.targets), right

    def skill_loss(self, random: np.random.Generator) -> Tensor:
        """The loss of questions of one adapter, which changes no more."""
        skill = random.choice(tuple(SKILLS))
        rows = self.skill_samples[skill]
        chosen = [rows[index] for index in random.integers(0, len(rows), self.options.skill_batch)]
        return self.loss(chosen, self.deltas[skill])[0]

    def export(self) -> Path:
        """Write the averaged weights as a Hugging Face folder, and in a file that later runs start from."""
        export_reading(self.out / "export", self.seeing["tower"], self.optimizer.averages, self.tokenizer)
        save_parts(self.out / "weights.safetensors", **self.seeing, decoder=self.optimizer.averages)
        return self.out / "export"


def train(run: DecoderRun, options: argparse.Namespace) -> None:
    run.draw(options.first_rows)
    started = saved = time.monotonic()
    shown: list[float] = []
    for step in range(run.step, options.steps):
        if step % options.draw_every == 0:
            run.draw(options.drawn_rows)
        random = np.random.default_rng((5, step))
        loss, right = run.loss(run.batch(random))
        loss.backward()
        skill_loss = run.skill_loss(random)
        (skill_loss * SKILL_SHARE).backward()
        decline = (options.steps - step) / (options.steps * options.decay)
        run.optimizer.step(min(1.0, (step + 1) / WARM_UP_STEPS, decline), min(AVERAGE_DECAY, (step + 1) / (step + 10)))
        run.step = step + 1
        now = loss.item(), right, skill_loss.item()
        shown = [0.95 * old + 0.05 * new for old, new in zip(shown or now, now, strict=True)]
        if run.step % SHOW_EVERY == 0:
            console.print(
                f"{run.step} of {options.steps} steps: loss {shown[0]:.3f}, tokens {shown[1]:.2%}, "
                f"adapters {shown[2]:.3f}; "
                f"{time.monotonic() - started:.0f} s ({time.process_time():.0f} s of CPU)",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        if time.monotonic() - saved > SAVE_SECONDS or run.step == options.steps:
            run.save()
            saved = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m training.pixie.reading.train_decoder", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "runs" / "reading")
    parser.add_argument("--start", type=Path, help="weights of an earlier run (weights.safetensors)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of a step, patches included")
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate")
    parser.add_argument("--decay", type=float, default=0.5, help="last share of the steps in which the rate falls")
    parser.add_argument("--rows", type=int, default=6000, help="images that are kept")
    parser.add_argument("--first-rows", type=int, default=1000, help="images before the first step")
    parser.add_argument("--drawn-rows", type=int, default=200, help="images that are drawn at a time")
    parser.add_argument("--draw-every", type=int, default=25, help="steps between them")
    parser.add_argument("--skill-rows", type=int, default=500, help="images for each adapter")
    parser.add_argument("--skill-batch", type=int, default=2, help="of which a step has this many")
    parser.add_argument("--fitted", type=int, default=200, help="scenes that the merger starts from")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    run = DecoderRun(options)
    train(run, options)
    run.save()
    console.print(f"Done: {run.export()}")


if __name__ == "__main__":
    main()
