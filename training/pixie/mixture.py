"""The X-LoRA classifier that mixes pixie's adapters, and the adapter by which it knows which of them is wanted.

What it is to say is known: all of an adapter from the words on that tell its skill, and nothing at images, before these
words, and for questions that pixie knows. In final hidden states little of that is left: they are about the next token.
So a further adapter, the router, is trained along with the classifier. It acts in the scaling pass alone, where all
adapters are whole, and writes into the hidden states which skill the words behind it have told; the classifier gives it
no scaling. Then the classifier is fitted closer to hidden states that are computed once.
"""

from __future__ import annotations

import json
import math
import random
import time
import warnings
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, XLoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.pixie.adapters import MIXTURE, NONE, RANK, TARGETS, TEXT, Questions, base_model, console, tidy
from training.pixie.precision import autocast
from training.pixie.rows import PADDING_GROUP
from training.pixie.skills import SKILLS
from training.pixie.tokenizer import IMAGE

ROUTER: Final = "router"
ROUTER_BATCH, ROUTER_RATE = 8, 3e-3
SIZE: Final = 256
STEPS, BATCH, RATE = 4000, 1024, 2e-3
KEPT_IMAGE_TOKENS: Final = 0.1
"""They are many and easily told."""


def train_mixture(tokenizer: Tokenizer, out: Path, count: int, *, router_steps: int, steps: int = STEPS) -> None:
    """Write an X-LoRA checkpoint over the adapters in a folder, which stay as they are, and its router.

    count: images to ask about. router_steps: of the router and the classifier; steps: of the classifier then.
    """
    rows = [*SKILLS, NONE, NONE, TEXT]
    folder = out / MIXTURE
    questions = Questions(base_model().model, tokenizer, rows, count)
    classifier = _train_router(questions, rows, out, count, router_steps)
    paths = {
        str(number): str(path) for number, path in enumerate((*(out / skill for skill in SKILLS), folder / ROUTER))
    }
    model = base_model()
    config = XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=model.config.text_config.hidden_size, adapters=paths, xlora_depth=2,
        xlora_size=SIZE, xlora_dropout_p=0.0, enable_softmax=False, scaling_pass_value=1.0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mixed = get_peft_model(model, config)
    layers = mixed.base_model.internal_xlora_classifier.layers
    layers.load_state_dict(classifier.state_dict())
    hidden, wanted = _examples(model, questions, rows, count)
    _fit(layers, hidden, wanted, steps)
    # PEFT's save_pretrained leaves out layers of the classifier.
    kept = {name: value for name, value in mixed.state_dict().items() if "internal_xlora_classifier" in name}
    save_file({name: value.contiguous() for name, value in kept.items()}, folder / "adapter_model.safetensors")
    content = {key: value for key, value in config.to_dict().items() if value is not None}
    content |= {"adapters": dict(zip(paths, (*SKILLS, ROUTER), strict=True)), "base_model_name_or_path": "pixie"}
    text = json.dumps(content | {"inference_mode": True}, indent=2, sort_keys=True, default=str)
    (folder / "adapter_model.safetensors").chmod(0o644)
    (folder / "adapter_config.json").write_text(text + "\n")


def _train_router(questions: Questions, rows: list[str], out: Path, count: int, steps: int) -> nn.Sequential:
    """Write the router and return the classifier that was trained with it. Goes on from those that are there."""
    model, folder = base_model(), out / MIXTURE
    width = model.config.text_config.hidden_size
    classifier = nn.Sequential(nn.Linear(width, SIZE), nn.ReLU(), nn.Linear(SIZE, len(SKILLS) + 1))
    if (folder / ROUTER).exists():
        adapted = PeftModel.from_pretrained(model, folder / ROUTER, adapter_name=ROUTER, is_trainable=True)
        tensors = load_file(folder / "adapter_model.safetensors")
        classifier.load_state_dict({name.rpartition("layers.")[2]: tensor for name, tensor in tensors.items()})
    else:
        router = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
        adapted = get_peft_model(model, router, adapter_name=ROUTER)
    for skill in SKILLS:
        adapted.load_adapter(out / skill, skill)
    adapted.base_model.set_adapter([*SKILLS, ROUTER])
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(f".{ROUTER}." in name)
    parameters = [*(p for p in adapted.parameters() if p.requires_grad), *classifier.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=ROUTER_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, ROUTER_RATE, max(steps, 2), pct_start=0.1)
    random_ = random.Random(0)
    started, shown = time.monotonic(), math.nan
    for step in range(steps):
        indices = [random_.randrange(count) for _ in range(ROUTER_BATCH)]
        inputs, tokens, _ = questions.batch(indices, model.get_input_embeddings())
        with autocast():
            states = model.model.language_model(**inputs, use_cache=False).last_hidden_state
        kept, scalings = _wanted(questions, rows, indices, tokens)
        loss = F.mse_loss(classifier(states[kept].float()), scalings[kept])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        shown = loss.item() if step == 0 else 0.95 * shown + 0.05 * loss.item()
        if step % 25 == 24 or step + 1 == steps:
            console.print(
                f"step {step + 1}: mean square {shown:.4f}, {time.monotonic() - started:.0f} s", highlight=False
            )
    adapted.save_pretrained(folder, selected_adapters=[ROUTER])
    tidy(folder / ROUTER)
    (folder / "README.md").unlink(missing_ok=True)
    return classifier


def _wanted(questions: Questions, rows: list[str], indices: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens to learn from, ``[rows, length]``, and the scalings that are wanted there, ``[rows, length,
    adapters]``. tokens: ``[rows, length]``."""
    kept = questions.field("groups", indices) != PADDING_GROUP
    kept &= (tokens != IMAGE) | (torch.rand(tokens.shape) < KEPT_IMAGE_TOKENS)
    skills = list(SKILLS)
    scalings = torch.zeros(*tokens.shape, len(skills) + 1)
    for row, index in enumerate(indices):
        if (skill := rows[index % len(rows)]) in skills:
            scalings[row, :, skills.index(skill)] = questions.field("known", [index])[0].float()
    return kept, scalings


def _examples(model: Any, questions: Questions, rows: list[str], count: int) -> tuple[Tensor, Tensor]:
    """Final hidden states of the scaling pass, ``[tokens, hidden_size]``, and the scalings that are wanted, ``[tokens,
    adapters]``. rows: of which skill they are, in turn."""
    hidden, wanted = [], []
    for start in range(0, count, 16):
        indices = range(start, min(start + 16, count))
        inputs, tokens, _ = questions.batch(indices, model.get_input_embeddings())
        with torch.inference_mode(), autocast():
            # Called like this, PEFT's layers add all adapters.
            states = model.model.language_model(**inputs, use_cache=False).last_hidden_state
        kept, scalings = _wanted(questions, rows, indices, tokens)
        hidden.append(states[kept].half())
        wanted.append(scalings[kept])
    return torch.cat(hidden), torch.cat(wanted)


def _fit(classifier: nn.Module, hidden: Tensor, wanted: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(classifier.parameters(), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps)
    shown = 0.0
    for step in range(steps):
        chosen = torch.randint(0, len(hidden), (BATCH,))
        loss = F.mse_loss(classifier(hidden[chosen].float()), wanted[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        shown = loss.item() if step == 0 else 0.99 * shown + 0.01 * loss.item()
        if step % 1000 == 999:
            console.print(f"step {step + 1}: mean square {shown:.4f}", highlight=False)
