"""Make a small Llama that is trained from nothing: python -m training.small_llama --out runs/small-llama

It learns the sources of Python's standard library and the middle of the manual that every Python brings along. Its
weights were never in few bits, its inputs are whole groups of 128, and text tells by perplexity what rounding costs:
measured on the beginning of the manual, calibrated with its end, neither of which it sees. As a model it is of no use.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vlmserve.perplexity import python_manual

END: Final = "<|end|>"
VOCABULARY: Final = 4096
WINDOW: Final = 1024
"""Tokens of a sequence."""
MANUAL: Final = (0.3, 0.8)
"""From where to where the manual is learned, as shares of its letters."""
MANUAL_TIMES: Final = 8
"""How often: sources are 25 times as long."""
WARM_UP_STEPS: Final = 50

console = Console()


def read_texts() -> list[str]:
    """Sources of the standard library, without tests, and the part of the manual that is learned, several times."""
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idle_test", "pydoc_data"}
    sources = [path for path in sorted(library.rglob("*.py")) if skipped.isdisjoint(path.relative_to(library).parts)]
    manual = python_manual()
    first, last = (int(share * len(manual)) for share in MANUAL)
    return [path.read_text("utf-8", errors="replace") for path in sources] + MANUAL_TIMES * [manual[first:last]]


def train_tokenizer(texts: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    """Pairs of bytes, merged into so many tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def make_model(vocabulary: int, *, hidden_size: int = 256, layers: int = 4) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=hidden_size // 64,
            num_key_value_heads=hidden_size // 128,
            max_position_embeddings=WINDOW,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
        )
    )


def sequences(tokenizer: Any, texts: Sequence[str], window: int) -> Tensor:
    """All texts, one behind the other, in pieces ``[pieces, window]`` in another order."""
    ids = [token for text in texts for token in (*tokenizer.encode(text, add_special_tokens=False), 0)]
    pieces = torch.tensor(ids[: len(ids) // window * window]).view(-1, window)
    return pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))]


def batches(pieces: Tensor, batch: int, steps: int) -> Iterator[Tensor]:
    for step in range(steps):
        yield pieces[torch.arange(step * batch, (step + 1) * batch) % len(pieces)]


def train(model: Any, pieces: Tensor, *, steps: int, batch: int, rate: float) -> float:
    """Teach the model to predict each token from those before it. Returns the mean loss of the last steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    started, shown = time.monotonic(), 0.0
    for step, tokens in enumerate(batches(pieces, batch, steps)):
        logits = model(tokens, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        scale = min(1.0, (step + 1) / WARM_UP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.item() if step == 0 else 0.95 * shown + 0.05 * loss.item()
        if step % 20 == 19 or step + 1 == steps:
            console.print(f"step {step + 1}: loss {shown:.4f}, {time.monotonic() - started:.0f} s", highlight=False)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the model")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=6, help=f"sequences of {WINDOW} tokens of a step")
    parser.add_argument("--rate", type=float, default=3e-3, help="the learning rate")
    options = parser.parse_args()
    texts = read_texts()
    tokenizer = train_tokenizer(texts, VOCABULARY)
    pieces = sequences(tokenizer, texts, WINDOW)
    console.print(f"{pieces.numel()} tokens in {len(texts)} texts", highlight=False)
    model = make_model(VOCABULARY)
    train(model, pieces, steps=options.steps, batch=options.batch, rate=options.rate)
    model.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
