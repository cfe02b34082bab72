"""Answers with drafts compared with answers without, interleaved in one process.

    python -m benchmarks.drafts
    python -m benchmarks.drafts --streams 1 16 --turns 10 --json report.json
    python -m benchmarks.drafts --family qwen3.5 --hidden 1024 --layers 8
    python -m benchmarks.drafts --family qwen3.5 --hidden 2048 --layers 24 --vocabulary 248320 --mtp 0.8 --kinds
    python -m benchmarks.drafts --family gemma4 --hidden 1536 --layers 35 --vocabulary 262144 --mtp 0.8 --kinds

Both engines share one model with random weights. Answers of "repeat", "JSON" and "copy" are scripted: each script token
gets the highest logit, after the model has computed all logits. "repeat": the same prompt again. "JSON": another list
of the same schema, after three others. "copy": passages of 24 tokens from the prompt, each followed by 4 new ones.
"MTP": random scripts. A random layer for multi-token prediction, or Gemma 4's assistant, computes all logits, then the
script's token becomes the draft with the probability of ``--mtp``. "random": tokens sampled at temperature 1 after a
new prompt. "repeats": several such requests again, with their seeds.
"Speedup" divides the time of requests without drafts by the time with them, prompts included. Figures are medians of
the turns' ratios. Store a report in `benchmarks/results/caches/MACHINE`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.command import keep, show_rows
from benchmarks.peers import version
from vlmserve.engine.engine import Engine
from vlmserve.engine.loading import load
from vlmserve.models.hub import resolve_model
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.runner.predictions import Predictions
from vlmserve.runner.runner import RunningStep
from vlmserve.settings.config import EngineConfig
from vlmserve.steps import SchedulerOutput
from vlmserve.types import EngineRequest, Grammar, Prompt, SamplingParams

COLUMNS = ("answers", "streams", "ms per token without drafts", "speedup", "accepted share")
NOTES = (
    "Speedup: time of requests without drafts divided by the time with them, prompts included. "
    "Accepted share: drafts that became part of answers. Medians of interleaved turns."
)
_ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "color": {"enum": ["red", "green"]}},
    "required": ["name", "count", "color"],
    "additionalProperties": False,
}
_LIST = Grammar.json({"type": "array", "items": _ITEM})
FAMILIES = {"llama": "Llama", "qwen3.5": "Qwen3.5", "lfm2": "LFM2", "gemma4": "Gemma 4"}
ASSISTANT = "assistant"
"""Folder of Gemma 4's assistant in its checkpoint."""
KINDS = "repeat", "JSON", "copy"
_BEST = 1e4
"""Logit of the scripted token."""


class Task(NamedTuple):
    prompt: list[int]
    script: list[int] | None
    grammar: Grammar | None = None


class Tasks:
    """Makes tasks of each kind."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, length: int) -> None:
        self._tokenizer, self._vocab_size, self._length = tokenizer, vocab_size, length
        self._random = random.Random(0)
        self._repeated = Task(self._tokens(64), self._tokens(length))
        self._prompts: dict[int, list[int]] = {}

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(10, self._vocab_size - 10), k=count)

    def make(self, kind: str, stream: int = 0) -> Task:
        """Return the next task of a kind."""
        if kind == "repeat":
            return self._repeated
        if kind == "repeats":
            return Task(self._prompts.setdefault(stream, self._tokens(64)), None)
        if kind == "random":
            return Task(self._tokens(64), None)
        if kind == "MTP":
            return Task(self._tokens(64), self._tokens(self._length))
        if kind == "copy":
            prompt, script = self._tokens(160), list[int]()
            while len(script) < self._length:
                start = self._random.randrange(len(prompt) - 24)
                script += prompt[start : start + 24] + self._tokens(4)
            return Task(prompt, script[: self._length])
        names = ["Ada", "Lena", "Omar", "Grace Hopper", "Li Wei", "Bob"]
        items = [
            {
                "name": self._random.choice(names) + f" {self._random.randrange(99)}",
                "count": self._random.randrange(10**4),
                "color": self._random.choice(["red", "green"]),
            }
            for _ in range(self._length // 16)
        ]
        return Task(self._tokens(64), self._tokenizer.encode(json.dumps(items, separators=(",", ":"))), _LIST)


class Scripted:
    """An engine, one request of which gets the tokens of a script."""

    def __init__(self, engine: Engine, right: float) -> None:
        """right: probability that multi-token prediction predicts the next token of a script."""
        self.engine = engine
        self._script: list[int] | None = None
        self._done = self._known = 0
        self._right, self._random = right, random.Random(0)
        self._logits_of, self._submit = engine.runner.logits_of, engine.runner.submit
        engine.runner.logits_of = self._scripted  # type: ignore[method-assign]
        predictions = engine.runner.predictions
        if (assistant := engine.runner.model.assistant) is not None:
            self._draft = assistant.draft
            assistant.draft = self._drafted  # type: ignore[method-assign]
            engine.runner.submit = self._submitted  # type: ignore[method-assign]
        elif isinstance(predictions, Predictions):
            self._predicted_logits_of = predictions.logits_of
            predictions.logits_of = self._predicted  # type: ignore[method-assign]
            engine.runner.submit = self._submitted  # type: ignore[method-assign]

    def _submitted(self, step: SchedulerOutput) -> RunningStep:
        drafts = step.draft_token_ids.get("0", [])
        agreeing = zip(drafts, (self._script or ())[self._done :], strict=False)
        self._known = self._done + 1 + sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], agreeing))
        return self._submit(step)

    def _predicted(self, states: Tensor) -> Tensor:
        logits = self._predicted_logits_of(states)
        if (token := self._next_draft()) is not None:
            logits[0, token] = _BEST
        return logits

    def _drafted(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        states, tokens = self._draft(*arguments)
        if (token := self._next_draft()) is not None:
            tokens[0] = token
        return states, tokens

    def _next_draft(self) -> int | None:
        """The script's next token, or None for a wrong draft."""
        known, self._known = self._known, self._known + 1
        if self._script and known < len(self._script) and self._random.random() < self._right:
            return self._script[known]
        return None

    def _scripted(self, hidden: Tensor) -> Tensor:
        logits = self._logits_of(hidden)
        for row, token in enumerate((self._script or ())[self._done : self._done + len(logits)]):
            logits[row, token] = _BEST
        return logits

    def answer(self, tasks: Sequence[Task], length: int) -> tuple[float, list[list[int]]]:
        """Answer tasks, a single one if it has a script. Return seconds and tokens."""
        self._script, self._done = tasks[0].script, 0
        answers: list[list[int]] = [[] for _ in tasks]
        started = time.perf_counter()
        for number, task in enumerate(tasks):
            # A grammar closes an answer early that comes near the maximum.
            most = length if task.grammar is None else 4 * length
            params = SamplingParams(
                temperature=1.0, seed=number, max_tokens=most, ignore_eos=True, grammar=task.grammar
            )
            self.engine.add(EngineRequest(str(number), Prompt(task.prompt), params))
        while self.engine.has_work():
            for output in self.engine.step():
                answers[int(output.request_id)] += output.token_ids
                self._done += len(output.token_ids)
        return time.perf_counter() - started, answers


def row(kind: str, streams: int, engines: Sequence[Scripted], tasks: Tasks, length: int, turns: int) -> list[Any]:
    """Measure one kind of answers. Raises RuntimeError if an answer does not follow its script."""
    plain, drafting = engines
    for _ in range(3):
        for one in engines:
            one.answer([tasks.make(kind)], length)
    before = drafting.engine.stats()
    ratios, of_token = [], []
    for turn in range(turns):
        asked = [tasks.make(kind, stream) for stream in range(streams)]
        taken = {}
        for one in engines if turn % 2 else engines[::-1]:
            taken[one], answers = one.answer(asked, length)
            if asked[0].script not in (None, answers[0]):
                raise RuntimeError(f"{kind}: {answers[0]} is not {asked[0].script}")
        ratios.append(taken[plain] / taken[drafting])
        of_token.append(1e3 * taken[plain] / len(answers[0]))
    after = drafting.engine.stats()
    drafted = after.drafted_tokens - before.drafted_tokens
    share = (after.accepted_drafts - before.accepted_drafts) / drafted if drafted else None
    figures = [statistics.median(of_token), statistics.median(ratios), share]
    return [kind, streams, *(None if figure is None else float(f"{figure:.3g}") for figure in figures)]


def _config(family: str, vocab_size: int, layers: int, hidden: int) -> Any:
    """Sizes of SmolLM2-135M's layers at a hidden size of 576, Qwen3.5-0.8B's and 2B's at 1024 and 2048,
    LFM2-1.2B's at 2048, and Gemma 4 E2B's at 1536, without its per-layer embeddings.
    """
    from transformers import Gemma4TextConfig, Lfm2Config, LlamaConfig, Qwen3_5TextConfig

    sizes = {"vocab_size": vocab_size, "hidden_size": hidden, "num_hidden_layers": layers}
    sizes |= {"max_position_embeddings": 2048}
    if family == "qwen3.5":
        return Qwen3_5TextConfig(
            **sizes, intermediate_size=3584 if hidden == 1024 else 3 * hidden, num_attention_heads=8,
            num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
            tie_word_embeddings=True,
        )  # fmt: skip
    if family == "gemma4":
        return Gemma4TextConfig(**sizes, **_GEMMA, intermediate_size=4 * hidden, num_kv_shared_layers=layers * 4 // 7,
                                use_double_wide_mlp=True, layer_types=_kinds_of(layers))  # fmt: skip
    if family == "lfm2":
        return Lfm2Config(
            **sizes, intermediate_size=6 * hidden, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 256,
            layer_types=["full_attention" if number % 3 == 2 else "conv" for number in range(layers)],
        )  # fmt: skip
    return LlamaConfig(
        **sizes, intermediate_size=8 * hidden // 3 // 64 * 64, num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 192),
    )  # fmt: skip


_GEMMA: dict[str, Any] = {
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
    "sliding_window": 512, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "pad_token_id": 0,
    "tie_word_embeddings": True,
}  # fmt: skip


def _kinds_of(layers: int) -> list[str]:
    return ["full_attention" if number % 5 == 4 else "sliding_attention" for number in range(layers - 1)] + [
        "full_attention"
    ]


def write_assistant(folder: Path, vocabulary: int, width: int, layers: int = 4, hidden: int = 256) -> None:
    """Write a random assistant for a Gemma 4 of this width."""
    text = {
        **_GEMMA, "model_type": "gemma4_text", "vocab_size": vocabulary, "hidden_size": hidden,
        "num_hidden_layers": layers, "intermediate_size": 8 * hidden, "layer_types": _kinds_of(layers),
        "max_position_embeddings": 2048,
    }  # fmt: skip
    config = {"model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "backbone_hidden_size": width, "text_config": text}))
    shapes = {"model.embed_tokens": (vocabulary, hidden), "model.norm": (hidden,)}
    shapes |= {"pre_projection": (hidden, 2 * width), "post_projection": (width, hidden)}
    norms = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    for number, kind in enumerate(_kinds_of(layers)):
        size = 512 if kind == "full_attention" else 256
        own = {"self_attn.q_proj": (8 * size, hidden), "self_attn.o_proj": (hidden, 8 * size)}
        own |= {"self_attn.q_norm": (size,), "mlp.down_proj": (hidden, 8 * hidden)}
        own |= {name: (hidden,) for name in norms} | {
            f"mlp.{name}_proj": (8 * hidden, hidden) for name in ("gate", "up")
        }
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in own.items()}
    tensors = {f"{name}.weight": (0.02 * torch.randn(shape)).to(torch.bfloat16) for name, shape in shapes.items()}
    for number in range(layers):
        tensors[f"model.layers.{number}.layer_scalar"] = torch.ones(1, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_checkpoint(
    folder: Path, family: str, layers: int, hidden: int, vocabulary: int | None = None, *, mtp: bool = False
) -> None:
    """Write a model with random weights and pixie's tokenizer.

    mtp: add a layer for multi-token prediction, with the shape and weights of the last layer, or an assistant.
    """
    from transformers import AutoModelForCausalLM

    pixie = resolve_model("pixie")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pixie / name, folder / name)
    torch.manual_seed(0)
    config = _config(family, vocabulary or Tokenizer.from_folder(pixie).vocab_size, layers, hidden)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1TB")
    if mtp and family == "gemma4":
        write_assistant(folder / ASSISTANT, config.vocab_size, hidden)
    elif mtp:
        path, before = folder / "model.safetensors", f"model.layers.{layers - 1}."
        tensors = load_file(path)
        last = {name.removeprefix(before): one for name, one in tensors.items() if name.startswith(before)}
        tensors |= {f"mtp.layers.0.{name}": one.clone() for name, one in last.items()}
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            tensors[f"mtp.{name}.weight"] = torch.zeros(hidden, dtype=torch.bfloat16)
        tensors["mtp.fc.weight"] = 0.02 * torch.randn(hidden, 2 * hidden).to(torch.bfloat16)
        save_file(tensors, path, {"format": "pt"})


def prepare_checkpoint(folder: Path, options: argparse.Namespace) -> None:
    """Write the model of these options, or use it again. Exits if the folder has something else."""
    mtp, made = options.mtp is not None, folder / "benchmark.json"
    shape = [options.family, options.layers, options.hidden, options.vocabulary, mtp]
    if made.exists():
        if (kept := json.loads(made.read_text())) != shape:
            sys.exit(f"{folder} has another model, {kept}: give another --checkpoint for {shape}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        sys.exit(f"{folder} is not empty: give --checkpoint a new folder")
    write_checkpoint(folder, options.family, options.layers, options.hidden, options.vocabulary, mtp=mtp)
    made.write_text(json.dumps(shape))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and show a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--family", choices=FAMILIES, default="llama", help="kind of layers (default llama)")
    parser.add_argument("--layers", type=int, default=30, help="layers of the model (default 30)")
    parser.add_argument("--hidden", type=int, default=576, help="hidden size of the model (default 576)")
    parser.add_argument("--vocabulary", type=int, help="tokens of the model's vocabulary (default: pixie's)")
    parser.add_argument("--mtp", type=float, help="multi-token prediction, and its share of right tokens in scripts")
    parser.add_argument("--quantize", default="none", help="weights as of vlmserve serve (default none: bfloat16)")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="kinds of answers (default: all)")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16], help="streams of random answers")
    parser.add_argument("--crowds", type=int, nargs="*", default=[4], help="streams of repeated requests (default 4)")
    parser.add_argument("--length", type=int, default=128, help="tokens of an answer (default 128)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, help="folder that keeps the model (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="vlmserve-drafts-") as place:
        folder = options.checkpoint or Path(place)
        mtp = options.mtp is not None
        prepare_checkpoint(folder, options)
        config = EngineConfig(
            model=str(folder),
            dtype="bfloat16",
            quantize=options.quantize,
            kv_cache_memory="256MiB",
            weights_cache_size=0,
            draft_model=str(folder / ASSISTANT) if mtp and options.family == "gemma4" else None,
        )
        model = load(config, folder)
        engines = [
            Scripted(Engine.from_model(config.model_copy(update={"speculation": way}), model), options.mtp or 0.0)
            for way in ("off", "auto")
        ]
        tasks = Tasks(Tokenizer.from_folder(folder), engines[0].engine.info.vocab_size, options.length)
        kinds = [(kind, 1) for kind in (*options.kinds, *(["MTP"] if mtp else []))] + [
            ("random", streams) for streams in options.streams
        ]
        kinds += [("repeats", streams) for streams in options.crowds]
        rows = [row(kind, streams, engines, tasks, options.length, options.turns) for kind, streams in kinds]
    source = "assistant" if options.family == "gemma4" else "MTP"
    report = {
        "title": "Drafts",
        "command": " ".join(["python -m benchmarks.drafts", *(arguments or sys.argv[1:])]),
        "model": f"{FAMILIES[options.family]} with {options.layers} layers of {options.hidden} values"
        + f" in {'bfloat16' if options.quantize == 'none' else options.quantize}"
        + (f", {source} right in {options.mtp:.0%} of scripts" if mtp else ""),
        "weights": "random",
        "versions": {package: version(package) for package in ("vlmserve", "torch")},
        "columns": list(COLUMNS),
        "rows": rows,
        "notes": NOTES,
    }
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()
