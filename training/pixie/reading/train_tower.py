"""Train the vision tower that reads: python -m training.pixie.reading.train_tower --out runs/reading

It learns what the generator knows of every patch: characters, colours, shapes and ranks. Text is large at first and
becomes smaller. The state is saved every few minutes; the same command resumes.
"""

from __future__ import annotations

import argparse
import os
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from training.pixie.optimizer import Optimizer
from training.pixie.reading.batches import GRIDS, SLACK, ImagePool, cropped, fill, phase_at
from training.pixie.reading.labels import FIRST_OF_MAP, READING_LABELS, SLOTS, patch_labels, truth_of_document
from training.pixie.reading.rows import draw_labelled, see
from training.pixie.reading.tower import ReadingHeads, ReadingTower, named_right, reading_loss
from training.pixie.reading.weights import load_part
from vlmserve.pixie.document_drawing import draw_document
from vlmserve.pixie.documents import Style, sample_document
from vlmserve.pixie.fonts import add_document_fonts
from vlmserve.pixie.scenes import HELD_OUT_SEEDS, sample_scene

RATE: Final = 2e-3
STEPS: Final = 9000
STEP_PATCHES: Final = 5000
WARM_UP_STEPS: Final = 50
AVERAGE_DECAY: Final = 0.995
SAVE_SECONDS: Final = 150.0
SHOW_EVERY: Final = 50
FIRST_SEED: Final = 9_000_000_000
"""Documents and scenes from here on are in no other stage."""
EVALUATED_PAGES: Final = 16
EVALUATED_SCENES: Final = 60
#: Bounds of capital letters, in pixels, for which characters are counted apart.
BANDS: Final = ((14, 20), (20, 32), (32, 64))

console = Console()


class TowerRun:
    """The tower under training, its images, and the state in a folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(options.seed)
        self.tower, self.heads = ReadingTower(), ReadingHeads()
        self.optimizers = {name: Optimizer(getattr(self, name), options.rate) for name in ("tower", "heads")}
        self.step = 0
        if (self.out / "tower.pt").exists():
            state = torch.load(self.out / "tower.pt")
            self.step = state["step"]
            for name, optimizer in self.optimizers.items():
                optimizer.load_state_dict(state[name])
        elif options.start:
            self.step = options.first_step
            for name, optimizer in self.optimizers.items():
                optimizer.load_state_dict(load_part(options.start, name))
        self.pool = ImagePool(self.out / "pool", options.pool)
        self.pool.progress.value = self.step / options.steps
        first_seed = FIRST_SEED + self.step * 10_007
        self.worker = get_context("fork").Process(
            target=fill, args=(self.pool, first_seed, options.drawing), daemon=True
        )

    def save(self) -> None:
        partial = self.out / "tower.tmp"
        torch.save({"step": self.step} | {name: part.state_dict() for name, part in self.optimizers.items()}, partial)
        os.replace(partial, self.out / "tower.pt")

    def wait_for_images(self) -> None:
        """Wait until every ring of the phase has a quarter of its images."""
        phase = phase_at(self.pool.progress.value)
        for number, weight in enumerate(phase.grids):
            while weight and self.pool.available(number) * 4 < self.pool.sizes[number]:
                if not self.worker.is_alive():
                    raise RuntimeError("the process that draws images ended; its error is above")
                time.sleep(0.2)

    def batch(self, arrays: list[dict[str, Any]], step: int, patches: int) -> tuple[Tensor, Tensor]:
        """Images of one size and their labels, ``[kinds, patches]``."""
        random = np.random.default_rng((4, step))
        shares = np.array(phase_at(self.pool.progress.value).grids)
        shares = shares * [self.pool.available(number) > 0 for number in range(len(GRIDS))]
        number = int(random.choice(len(GRIDS), p=shares / shares.sum()))
        rows, columns = GRIDS[number]
        indices = np.sort(random.integers(0, self.pool.available(number), max(1, round(patches / (rows * columns)))))
        x, y = random.integers(0, SLACK + 1, 2).tolist()
        images, labels = cropped(arrays[number], GRIDS[number], indices, (x, y))
        if random.random() < 0.3:
            # Colours keep their names only if channels keep their places; brightness may change a little.
            images = np.clip(images * random.uniform(0.85, 1.0) + random.uniform(0, 30), 0, 255).astype(np.uint8)
        return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.reshape(len(labels), -1))


@torch.inference_mode()
def characters_read(tower: ReadingTower, heads: ReadingHeads) -> list[float]:
    """The share of characters that patches name right, in fonts that training never shows, for each of `BANDS`."""
    shares = []
    for number, band in enumerate(BANDS):
        images, truths = [], []
        for index in range(EVALUATED_PAGES):
            seed = HELD_OUT_SEEDS + 1000 * number + index
            document = sample_document(seed, "page", (224, 224), Style(band, new=True))
            images.append(np.asarray(draw_document(document)))
            truths.append(truth_of_document(document))
        maps, characters = (np.stack([truth[part] for truth in truths]) for part in (0, 1))
        labels = torch.from_numpy(patch_labels(maps, characters, (0, 0), (14, 14)).reshape(len(READING_LABELS), -1))
        logits = heads(tower(torch.from_numpy(np.stack(images))))
        parts = logits.split([kind.num_classes for kind in READING_LABELS], -1)[:SLOTS]
        named = torch.stack([part.argmax(-1) for part in parts])
        wanted = labels[:SLOTS].long()
        shares.append(float(((named == wanted) & (wanted > 0)).sum() / (wanted > 0).sum()))
    return shares


@torch.inference_mode()
def things_named(tower: ReadingTower, heads: ReadingHeads) -> dict[str, float]:
    """The share of patches with items of held-out scenes that name them right, for each kind of label. Questions about
    shapes need ranks, counts and places of nearly all items.
    """
    drawn = [draw_labelled(sample_scene(HELD_OUT_SEEDS + seed, "grid")) for seed in range(EVALUATED_SCENES)]
    features = torch.cat(see(tower, [pixels for pixels, _ in drawn]))
    labels = torch.from_numpy(np.concatenate([labels for _, labels in drawn], 1))
    shares = zip(READING_LABELS[FIRST_OF_MAP:], named_right(heads(features), labels)[FIRST_OF_MAP:], strict=True)
    return {kind.name: share for kind, share in shares if kind.name != "covering character"}


def train(run: TowerRun, options: argparse.Namespace) -> None:
    arrays = run.pool.open("r")
    shown: np.ndarray[Any, Any] | None = None
    started = saved = time.monotonic()
    for step in range(run.step, options.steps):
        run.pool.progress.value = step / options.steps
        images, labels = run.batch(arrays, step, options.patches)
        logits = run.heads(run.tower(images))
        loss = reading_loss(logits, labels)
        loss.backward()
        decline = (options.steps - step) / (options.steps * options.decay)
        scale = min(1.0, (step + 1) / WARM_UP_STEPS, decline)
        for optimizer in run.optimizers.values():
            optimizer.step(scale, min(AVERAGE_DECAY, (step + 1) / (step + 10)))
        run.step = step + 1
        if run.step % 10 == 0:
            new = np.array([loss.item(), *named_right(logits, labels)])
            shown = new if shown is None else 0.8 * shown + 0.2 * new
        if run.step % SHOW_EVERY == 0 and shown is not None:
            names = ("loss", *(kind.name for kind in READING_LABELS))
            news = ", ".join(f"{name} {value:.3f}" for name, value in zip(names, shown, strict=True))
            console.print(
                f"{run.step} steps, {time.monotonic() - started:.0f} s ({time.process_time():.0f} s of CPU): {news}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        if run.step % options.evaluate_every == 0 or run.step == options.steps:
            shares = zip(BANDS, characters_read(run.tower, run.heads), strict=True)
            news = ", ".join(f"{low} to {high} px {share:.1%}" for (low, high), share in shares)
            console.print(f"held-out characters: {news}", highlight=False, soft_wrap=True)
            named = ", ".join(f"{name} {share:.1%}" for name, share in things_named(run.tower, run.heads).items())
            console.print(f"held-out scenes: {named}", highlight=False, soft_wrap=True)
        if time.monotonic() - saved > SAVE_SECONDS or run.step == options.steps:
            run.save()
            saved = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m training.pixie.reading.train_tower", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "runs" / "reading")
    parser.add_argument("--fonts", type=Path, help="folder of further fonts that documents are printed in")
    parser.add_argument("--start", type=Path, help="weights of an earlier run (weights.safetensors)")
    parser.add_argument(
        "--first-step", type=int, default=0, help="step of the weights of --start, for phases and rates"
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--patches", type=int, default=STEP_PATCHES, help="patches of a step")
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate")
    parser.add_argument("--decay", type=float, default=0.4, help="last share of the steps in which the rate falls")
    parser.add_argument("--pool", type=int, default=100_000, help="patches of images of each size that are kept")
    parser.add_argument("--drawing", type=float, default=0.25, help="share of a core that draws images")
    parser.add_argument("--evaluate-every", type=int, default=400, help="steps between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.fonts:
        console.print(f"{add_document_fonts(options.fonts)} further fonts", highlight=False)
    run = TowerRun(options)
    run.worker.start()
    try:
        run.wait_for_images()
        train(run, options)
    finally:
        run.worker.terminate()


if __name__ == "__main__":
    main()
