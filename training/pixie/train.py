"""Train pixie from nothing: python -m training.pixie.train --out runs/pixie

First the vision tower learns what covers each part of an image, then the whole model learns answers, at last mostly
those that take longest. The state is saved every few minutes; the same command goes on where it was stopped. At the end
the Hugging Face folder is in OUT/export, and `vlmserve eval pixie --model OUT/export` says how good it is.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from training.pixie.export import IMAGE_TOKENS, export
from training.pixie.labels import LABELS
from training.pixie.model import Decoder, DenseHeads, Tower, dense_loss, hugging_face_names
from training.pixie.optimizer import Optimizer
from training.pixie.rows import BROAD, COUNTING, READING, ROWS_PER_IMAGE, Mixture, Pool, fill
from training.pixie.tokenizer import IMAGE, train_tokenizer

TOWER_BATCH, MODEL_BATCH = 160, 32
WARM_UP_STEPS = 60
MIN_POOL = 2000
AVERAGE_DECAY = 0.995
AUXILIARY_WEIGHT = 0.4
TOWER_LEARNING_RATE, MODEL_LEARNING_RATE = 2e-3, 2e-3
TOWER_SHARE = 0.5
"""Of the learning rate, for the tower while the whole model learns."""
SAVE_SECONDS = 180.0

console = Console()


class Run:
    """A folder of training state, the pool of data, and the models under training."""

    def __init__(self, options: argparse.Namespace, mixture: Mixture = BROAD) -> None:
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.device = torch.device(options.device)
        self.decay_share: float = options.decay
        torch.manual_seed(options.seed)
        self.tokenizer_file = self.out / "tokenizer.json"
        if not self.tokenizer_file.exists():
            console.print("Training the tokenizer")
            train_tokenizer().save(str(self.tokenizer_file))
        self.tower, self.heads, self.decoder = Tower().to(self.device), DenseHeads().to(self.device), Decoder()
        self.decoder.to(self.device)
        self.pool = Pool(self.out / "pool", options.pool)
        self.state = self._load()
        self._worker = get_context("fork").Process(
            target=fill,
            args=(self.pool, self.tokenizer_file, self._first_seed(options.seed), options.pause, mixture),
            daemon=True,
        )

    def _load(self) -> dict[str, Any]:
        path = self.out / "state.pt"
        return torch.load(path, map_location=self.device) if path.exists() else {"tower_steps": 0, "model_steps": 0}

    def _first_seed(self, seed: int) -> int:
        """Far from where earlier parts of this run began, so that resuming brings new images."""
        return (seed * 1_000_003 + (self.state["tower_steps"] + self.state["model_steps"]) * 10_007) % (1 << 33)

    def __enter__(self) -> Run:
        self._worker.start()
        with console.status("Drawing the first images"):
            while self.pool.available < min(MIN_POOL, self.pool.size):
                if not self._worker.is_alive():
                    raise RuntimeError("the process that draws images ended; its error is above")
                time.sleep(0.2)
        self.arrays = self.pool.open("r")
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.terminate()

    def optimizers(self, rates: Mapping[str, float]) -> dict[str, Optimizer]:
        """An optimizer for each module with its learning rate, which goes on from the state if it is in there."""
        optimizers = {name: Optimizer(getattr(self, name), rate) for name, rate in rates.items()}
        for name, optimizer in optimizers.items():
            if name in self.state:
                optimizer.load_state_dict(self.state[name])
        return optimizers

    def save(self, **parts: Any) -> None:
        """Write the state, whole or not at all."""
        self.state |= parts
        torch.save(self.state, self.out / "state.tmp")
        os.replace(self.out / "state.tmp", self.out / "state.pt")

    def scale(self, step: int, steps: int) -> float:
        """Of the learning rate: a short warm-up, a plateau, then down to nothing."""
        return min(1.0, (step + 1) / WARM_UP_STEPS, (steps - step) / max(1.0, steps * self.decay_share))

    def take(self, name: str, indices: Any) -> torch.Tensor:
        """Rows of an array of the pool, on the device."""
        return torch.from_numpy(np.array(self.arrays[name][indices])).to(self.device)


@contextmanager
def _progress(title: str, done: int, total: int) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[news]}"), console=console) as progress:
        task = progress.add_task(title, completed=done, total=total, news="")
        yield lambda step, news: progress.update(task, completed=step, news=news)


class _Average:
    """A moving average of what a step measured."""

    def __init__(self) -> None:
        self.values: np.ndarray[Any, Any] | None = None

    def add(self, *values: float) -> None:
        new = np.array(values)
        self.values = new if self.values is None else 0.97 * self.values + 0.03 * new


def train_tower(run: Run, steps: int) -> None:
    """The tower alone, on dense labels."""
    optimizers = run.optimizers(dict.fromkeys(("tower", "heads"), TOWER_LEARNING_RATE))
    average, saved = _Average(), time.monotonic()
    with _progress("Vision tower", run.state["tower_steps"], steps) as show:
        for step in range(run.state["tower_steps"], steps):
            random = np.random.default_rng((1, step))
            indices = np.sort(random.integers(0, run.pool.available, TOWER_BATCH))
            features = run.tower(run.take("images", indices))
            loss, right = dense_loss(run.heads(features), run.take("labels", indices), late=False)
            loss.backward()
            for optimizer in optimizers.values():
                optimizer.step(run.scale(step, steps), AVERAGE_DECAY)
            average.add(loss.item(), *right)
            news = _news(average, ("loss", *(kind.name for kind in LABELS if not kind.late)))
            show(step + 1, news)
            if time.monotonic() - saved > SAVE_SECONDS or step + 1 == steps:
                run.save(tower_steps=step + 1, **{name: part.state_dict() for name, part in optimizers.items()})
                saved = time.monotonic()
                console.print(f"{step + 1} steps: {news}", highlight=False, soft_wrap=True)


def train_model(run: Run, end: int, steps: int) -> None:
    """The whole model, on packed rows of questions, the dense labels as an auxiliary loss all along.

    Goes on to step `end` of `steps`, over which the learning rate falls.
    """
    fresh = run.state["model_steps"] == 0
    if fresh:
        run.tower.load_state_dict(run.state["tower"]["averages"])
        with torch.no_grad():
            run.decoder.fit_projector(run.tower.float()(run.take("images", slice(0, 256))))
    shares = {"tower": TOWER_SHARE, "heads": TOWER_SHARE, "decoder": 1.0}
    optimizers = run.optimizers({name: share * MODEL_LEARNING_RATE for name, share in shares.items()})
    average, saved = _Average(), time.monotonic()
    with _progress("Whole model ", run.state["model_steps"], steps) as show:
        for step in range(run.state["model_steps"], end):
            answer_loss, right, dense_right = _model_step(run, step)
            for optimizer in optimizers.values():
                optimizer.step(run.scale(step, steps), min(AVERAGE_DECAY, (step + 1) / (step + 10)))
            average.add(answer_loss, right, *dense_right)
            news = _news(average, ("loss", "tokens", *(kind.name for kind in LABELS)))
            show(step + 1, news)
            if time.monotonic() - saved > SAVE_SECONDS or step + 1 == end:
                run.save(model_steps=step + 1, **{name: part.state_dict() for name, part in optimizers.items()})
                saved = time.monotonic()
                console.print(f"{step + 1} steps: {news}", highlight=False, soft_wrap=True)


def _model_step(run: Run, step: int) -> tuple[float, float, list[float]]:
    """Gradients of one batch. Returns the loss on answers, the share of their tokens that is right, and the labels'."""
    random = np.random.default_rng((2, step))
    rows = np.sort(random.integers(0, run.pool.available * ROWS_PER_IMAGE, MODEL_BATCH))
    tokens, positions, groups, branches = (
        run.take(name, rows).long() for name in ("tokens", "positions", "groups", "branches")
    )
    used = np.array(run.arrays["row_images"][rows]).reshape(-1)
    unique, places = np.unique(used[used >= 0], return_inverse=True)
    # A row that is being rewritten may not fit its images yet: its batch is drawn again.
    if len(places) * IMAGE_TOKENS != int((tokens == IMAGE).sum()):
        return _model_step(run, step + (1 << 40))
    said = F.pad(run.take("said", rows)[:, 1:], (0, 1))
    targets = F.pad(tokens[:, 1:], (0, 1))[said]
    features = run.tower(run.take("images", unique))
    logits = run.decoder(tokens, positions, groups, branches, features[torch.from_numpy(places)], said).float()
    answer_loss = F.cross_entropy(logits, targets)
    auxiliary, dense_right = dense_loss(run.heads(features), run.take("labels", unique), late=True)
    (answer_loss + AUXILIARY_WEIGHT * auxiliary).backward()
    return answer_loss.item(), float((logits.argmax(-1) == targets).float().mean()), dense_right


def _news(average: _Average, names: tuple[str, ...]) -> str:
    assert average.values is not None
    return " ".join(f"{name} {value:.3f}" for name, value in zip(names, average.values, strict=True))


def export_run(run: Run) -> Path:
    """Write the averaged weights as a Hugging Face folder."""
    folder = run.out / "export"
    weights = hugging_face_names(run.state["tower"]["averages"], run.state["decoder"]["averages"])
    export(
        folder, {name: tensor.cpu() for name, tensor in weights.items()}, Tokenizer.from_file(str(run.tokenizer_file))
    )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.pixie.train", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "runs", help="folder for state and result")
    parser.add_argument("--tower-steps", type=int, default=1200, help=f"steps of {TOWER_BATCH} images")
    parser.add_argument("--model-steps", type=int, default=6600, help=f"steps of {MODEL_BATCH} rows of questions")
    parser.add_argument(
        "--counting-steps", type=int, default=2400, help="of them, with mostly what takes longest: counting and finding"
    )
    parser.add_argument(
        "--reading-steps", type=int, default=800, help="the last of them, with more numbers, words and whole lists"
    )
    parser.add_argument(
        "--decay", type=float, default=0.7, help="last share of a stage in which its learning rate falls"
    )
    parser.add_argument("--pool", type=int, default=20_000, help="images that are kept at a time")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between new images once the pool is full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    begin_reading = options.model_steps - options.reading_steps
    parts = (
        (BROAD, begin_reading - options.counting_steps),
        (COUNTING, begin_reading),
        (READING, options.model_steps),
    )
    for mixture, end in parts:
        run = Run(options, mixture)
        if run.state["model_steps"] >= end:
            continue
        with run:
            if run.state["model_steps"] == 0:
                train_tower(run, options.tower_steps)
            train_model(run, end, options.model_steps)
    console.print(f"Done: {export_run(run)}")


if __name__ == "__main__":
    main()
