"""Teach the decoder to read: python -m training.pixie.reading.train_decoder --out runs/reading

Starts from the language model of `training.pixie.forms` and the tower of `train_tower`. The tower learns from the
answers as well, and still names what patches show. Questions about scenes, forms and calls of functions are asked
again, and the adapters' questions with the frozen adapters, so that all of them stay right. The state is saved every
few minutes; the same command resumes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor
from torch.func import functional_call

from training.pixie.export import load_llava
from training.pixie.forms import ADAPTERS, adapter_deltas
from training.pixie.model import Decoder, Tower, take_weights
from training.pixie.optimizer import Optimizer
from training.pixie.precision import parameter_dtype
from training.pixie.reading.decoder import ReadingDecoder, fit_merger, take_pixie
from training.pixie.reading.export import export_reading
from training.pixie.reading.rows import Drawn, flat_batch, sample_row, sample_skill_row, see
from training.pixie.reading.tower import WIDTH, ReadingHeads, ReadingTower, reading_loss
from training.pixie.reading.weights import load_part, save_parts
from training.pixie.rows import squash
from training.pixie.skills import SKILLS
from vlmserve.models.hub import resolve_model
from vlmserve.pixie.drawing import draw_scene
from vlmserve.pixie.fonts import add_document_fonts
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

RATES: Final = {"tower": 0.5, "heads": 0.5, "decoder": 1.0}
"""Shares of the learning rate."""
LABELS_SHARE: Final = 0.1
"""Weight of the loss of what patches show."""

console = Console()


class DecoderRun:
    """The decoder and the tower under training, samples with their images, and the state in a folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(options.seed)
        self.options = options
        self.tokenizer = Tokenizer.from_file(str(resolve_model("pixie") / "tokenizer.json"))
        self.dtype = parameter_dtype(torch.device("cpu"))
        self.tower, self.heads, self.decoder = ReadingTower(), ReadingHeads(), ReadingDecoder()
        file = self.out / "decoder.pt"
        state = torch.load(file) if file.exists() else self._first_state()
        self.step: int = state["step"]
        if "decoder" not in state:
            self.tower.load_state_dict(state["tower"]["averages"])
            self._start()
        self.optimizers = {part: Optimizer(getattr(self, part), share * options.rate) for part, share in RATES.items()}
        for part, optimizer in self.optimizers.items():
            if part in state:
                optimizer.load_state_dict(state[part])
        self.samples: list[Drawn] = []
        self.drawn = 0
        self.painters = get_context("fork").Pool(torch.get_num_threads())
        """Processes that draw, while training waits."""
        self.skill_samples = {
            skill: self._sampled(sample_skill_row, [(SKILL_SEED + n, skill) for n in range(options.skill_rows)])
            for skill in SKILLS
        }
        self.deltas = {
            skill: {name: delta.to(self.dtype) for name, delta in adapter_deltas(ADAPTERS / skill).items()}
            for skill in SKILLS
        }

    def _first_state(self) -> dict[str, Any]:
        """What a new run starts from: a tower that was trained here, or the file of an earlier run."""
        start: Path | None = self.options.start
        state: dict[str, Any] = {} if start is None else {part: load_part(start, part) for part in RATES}
        trained = self.out / "tower.pt"
        if trained.exists():
            state |= torch.load(trained)
        elif start is None:
            raise SystemExit(f"{self.out} has no tower.pt: run train_tower first, or pass --start weights.safetensors")
        return state | {"step": 0}

    def _start(self) -> None:
        """Start from pixie, with a merger that shows scenes as pixie's own tower does."""
        pixie = load_llava(self.options.pixie).state_dict()
        take_pixie(self.decoder, pixie)
        tower, decoder = Tower(), Decoder()
        take_weights(tower, decoder, pixie)
        scenes = [sample_scene(FIRST_SEED + index) for index in range(self.options.fitted)]
        small = torch.from_numpy(np.stack([squash(scene) for scene in scenes]))
        size = SIDE_OF_SCENES, SIDE_OF_SCENES
        large = [np.asarray(draw_scene(scene).resize(size, Image.Resampling.BICUBIC)) for scene in scenes]
        with torch.inference_mode():
            wanted = decoder.project(tower(small)).flatten(0, 1).clone()
            seen = torch.cat(see(self.tower, large))
        console.print(f"merger: relative error {fit_merger(self.decoder, seen, wanted):.2f}", highlight=False)

    def draw(self, count: int) -> None:
        """Draw samples; the oldest go if there are more than enough."""
        first = FIRST_SEED + (self.step + self.drawn + 1) * 1_000_003
        self.samples += self._sampled(sample_row, [(first + index,) for index in range(count)])
        self.drawn += count
        del self.samples[: -self.options.rows]

    def _sampled(self, sample: Callable[..., Drawn], seeds: Sequence[tuple[Any, ...]]) -> list[Drawn]:
        return self.painters.starmap(partial(sample, tokenizer=self.tokenizer), seeds, chunksize=8)

    def save(self) -> None:
        partial_file = self.out / "decoder.tmp"
        states = {part: optimizer.state_dict() for part, optimizer in self.optimizers.items()}
        torch.save({"step": self.step} | states, partial_file)
        os.replace(partial_file, self.out / "decoder.pt")

    def batch(self, random: np.random.Generator) -> list[Drawn]:
        """Random samples of about as many tokens as a step computes."""
        chosen: list[Drawn] = []
        left = self.options.tokens
        while left > 0:
            chosen.append(self.samples[random.integers(len(self.samples))])
            left -= chosen[-1].sample.length
        return chosen

    def skill_batch(self, random: np.random.Generator) -> tuple[list[Drawn], Mapping[str, Tensor]]:
        """Questions of one adapter, and what it adds to the weights."""
        skill = random.choice(tuple(SKILLS))
        rows = self.skill_samples[skill]
        return [rows[index] for index in random.integers(0, len(rows), self.options.skill_batch)], self.deltas[skill]

    def loss(
        self, chosen: Sequence[Drawn], features: Sequence[Sequence[Tensor]], delta: Mapping[str, Tensor]
    ) -> tuple[Tensor, float]:
        """The loss of samples, and the share of tokens that are right.

        features: of each sample's images. delta: added to the decoder's weights.
        """
        batch = flat_batch([drawn.sample for drawn in chosen], self.dtype)
        shown = [own[image] for drawn, own in zip(chosen, features, strict=True) for image in drawn.sample.shown]
        seen = torch.cat(shown) if shown else torch.empty(0, WIDTH, dtype=self.dtype)
        changed = {
            name: parameter + delta[name] for name, parameter in self.decoder.named_parameters() if name in delta
        }
        arguments = batch.tokens, batch.positions, batch.flat, seen, batch.said
        logits = functional_call(self.decoder, changed, arguments)
        right = float((logits.argmax(-1) == batch.targets).float().mean())
        return F.cross_entropy(logits.float(), batch.targets), right

    def learn(self, random: np.random.Generator, scale: float, decay: float) -> tuple[float, ...]:
        """Take one step; see `Optimizer.step`. Returns the loss, the share of tokens that are right, the loss of
        adapters, and the loss of patches.
        """
        chosen = self.batch(random)
        skilled, delta = self.skill_batch(random)
        every = [*chosen, *skilled]
        flat = see(self.tower, [image for drawn in every for image in drawn.images])
        remaining = iter(flat)
        features = [[next(remaining) for _ in drawn.images] for drawn in every]
        loss, right = self.loss(chosen, features[: len(chosen)], {})
        skill_loss, _ = self.loss(skilled, features[len(chosen) :], delta)
        labels = np.concatenate([shown for drawn in every for shown in drawn.labels], 1)
        label_loss = reading_loss(self.heads(torch.cat(flat)), torch.from_numpy(labels))
        (loss + SKILL_SHARE * skill_loss + LABELS_SHARE * label_loss).backward()
        for optimizer in self.optimizers.values():
            optimizer.step(scale, decay)
        return loss.item(), right, skill_loss.item(), label_loss.item()

    def export(self) -> Path:
        """Write the averaged weights as a Hugging Face folder, and in a file that later runs start from."""
        averages = {part: optimizer.averages for part, optimizer in self.optimizers.items()}
        export_reading(self.out / "export", averages["tower"], averages["decoder"], self.tokenizer)
        save_parts(self.out / "weights.safetensors", **averages)
        return self.out / "export"


def train(run: DecoderRun, options: argparse.Namespace) -> None:
    run.draw(options.first_rows)
    started = saved = time.monotonic()
    shown: list[float] = []
    for step in range(run.step, options.steps):
        if step % options.draw_every == 0:
            run.draw(options.drawn_rows)
        decline = (options.steps - step) / (options.steps * options.decay)
        scale = min(1.0, (step + 1) / WARM_UP_STEPS, decline)
        now = run.learn(np.random.default_rng((5, step)), scale, min(AVERAGE_DECAY, (step + 1) / (step + 10)))
        run.step = step + 1
        shown = [0.95 * old + 0.05 * new for old, new in zip(shown or now, now, strict=True)]
        if run.step % SHOW_EVERY == 0:
            console.print(
                f"{run.step} of {options.steps} steps: loss {shown[0]:.3f}, tokens {shown[1]:.2%}, "
                f"adapters {shown[2]:.3f}, patches {shown[3]:.2f}; "
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
    parser.add_argument("--fonts", type=Path, help="folder of further fonts that documents are printed in")
    parser.add_argument("--start", type=Path, help="weights of an earlier run (weights.safetensors)")
    parser.add_argument(
        "--pixie", type=Path, default=Path(__file__).parents[1] / "runs" / "forms" / "export",
        help="the folder whose language model a run without --start begins with",
    )  # fmt: skip
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
    if options.fonts:
        console.print(f"{add_document_fonts(options.fonts)} further fonts", highlight=False)
    run = DecoderRun(options)
    try:
        train(run, options)
    finally:
        run.painters.terminate()
    run.save()
    console.print(f"Done: {run.export()}")


if __name__ == "__main__":
    main()
