"""Train a small Llama on the texts that come with Python: python -m training.text --out runs/text

It is for measuring what quantization costs a language model whose weights were never in few bits, and whose inputs are
multiples of 128 everywhere. It reads the sources of the standard library and the manual, but for the manual's
beginning, by which `vlmserve eval quality` measures. As a model of language it is of little use.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.pixie.precision import autocast
from vlmserve.perplexity import python_manual

VOCAB_SIZE: Final = 4096
END: Final = "<|end|>"
"""Between two texts."""
LEFT_OUT: Final = 150_000
"""Characters of the manual's beginning that are not trained on."""
LENGTH: Final = 512
WARM_UP_STEPS: Final = 30

console = Console()


def texts() -> list[str]:
    """The sources of this Python's standard library, without its tests, and the rest of the manual."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "site-packages", "dist-packages", "pydoc_data", "idlelib", "__pycache__"}
    files = [path for path in sorted(library.rglob("*.py")) if left_out.isdisjoint(path.relative_to(library).parts)]
    return [*(path.read_text("utf-8", "replace") for path in files), python_manual()[LEFT_OUT:]]


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        documents, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def new_model(end: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
        )
    )


def batches(tokens: Tensor, steps: int, batch: int) -> Iterator[Tensor]:
    """Pieces of the text from random places, ``[batch, LENGTH + 1]``."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (batch,), generator=generator)
        yield torch.stack([tokens[start : start + LENGTH + 1] for start in starts.tolist()])


def train(model: LlamaForCausalLM, tokens: Tensor, *, steps: int, batch: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    started, shown = time.monotonic(), 0.0
    for step, pieces in enumerate(batches(tokens, steps, batch)):
        with autocast():
            logits = model(input_ids=pieces[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), pieces[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        scale = min(1.0, (step + 1) / WARM_UP_STEPS) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.item() if step == 0 else 0.95 * shown + 0.05 * loss.item()
        if step % 10 == 9 or step + 1 == steps:
            console.print(f"step {step + 1}: loss {shown:.3f}, {time.monotonic() - started:.0f} s", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the model")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=12, help=f"pieces of {LENGTH} tokens in a step")
    parser.add_argument("--rate", type=float, default=4e-3, help="the learning rate")
    options = parser.parse_args()
    documents = texts()
    tokenizer = train_tokenizer(documents)
    tokens = torch.tensor(tokenizer(END.join(documents), add_special_tokens=False, verbose=False)["input_ids"])
    console.print(f"{len(documents)} texts, {len(tokens)} tokens", highlight=False)
    model = new_model(tokenizer.eos_token_id)
    train(model, tokens, steps=options.steps, batch=options.batch, rate=options.rate)
    model.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
