"""The X-LoRA classifier that mixes pixie's adapters.

What it is to say is known: all of an adapter from the words on that tell its skill, and nothing at images, before these
words, and for questions that pixie knows. So it learns that, token by token, from final hidden states of the scaling
pass, which are computed once. In that pass all adapters are whole: each changes most what belongs to its skill, and
hidden states tell skills better than those of pixie itself.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from peft import XLoraConfig, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.pixie.adapters import MIXTURE, NONE, Questions, base_model, console
from training.pixie.rows import PADDING_GROUP
from training.pixie.tokenizer import IMAGE
from vlmserve.pixie.skills import SKILLS

SIZE: Final = 256
STEPS, BATCH, RATE = 8000, 1024, 5e-3
KEPT_IMAGE_TOKENS: Final = 0.1
"""They are many and easily told."""


def train_mixture(tokenizer: Tokenizer, out: Path, count: int, steps: int = STEPS) -> None:
    """Write an X-LoRA checkpoint over the adapters in a folder, which stay as they are. count: images to ask about."""
    model = base_model()
    rows = [*SKILLS, NONE, NONE]
    questions = Questions(model.model, tokenizer, rows, count)
    paths = {str(number): str(out / skill) for number, skill in enumerate(SKILLS)}
    config = XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=model.config.text_config.hidden_size, adapters=paths, xlora_depth=2,
        xlora_size=SIZE, xlora_dropout_p=0.0, enable_softmax=False, scaling_pass_value=1.0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mixed = get_peft_model(model, config)
    hidden, wanted = _examples(model, questions, rows, count)
    _fit(mixed.base_model.internal_xlora_classifier.layers, hidden, wanted, steps)
    folder = out / MIXTURE
    folder.mkdir(parents=True, exist_ok=True)
    # PEFT's save_pretrained leaves out layers of the classifier.
    kept = {name: value for name, value in mixed.state_dict().items() if "internal_xlora_classifier" in name}
    save_file({name: value.contiguous() for name, value in kept.items()}, folder / "adapter_model.safetensors")
    content = {key: value for key, value in config.to_dict().items() if value is not None}
    content |= {"adapters": dict(zip(paths, SKILLS, strict=True)), "base_model_name_or_path": "pixie"}
    text = json.dumps(content | {"inference_mode": True}, indent=2, sort_keys=True, default=str)
    (folder / "adapter_config.json").write_text(text + "\n")


def _examples(model: Any, questions: Questions, rows: list[str], count: int) -> tuple[Tensor, Tensor]:
    """Final hidden states of the scaling pass, ``[tokens, hidden_size]``, and the scalings that are wanted, ``[tokens,
    adapters]``. rows: of which skill they are, in turn."""
    hidden, wanted = [], []
    skills = list(SKILLS)
    for start in range(0, count, 16):
        indices = range(start, min(start + 16, count))
        inputs, tokens, _ = questions.batch(indices, model.get_input_embeddings())
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            # Called like this, PEFT's layers add all adapters.
            states = model.model.language_model(**inputs, use_cache=False).last_hidden_state
        kept = questions.field("groups", indices) != PADDING_GROUP
        kept &= (tokens != IMAGE) | (torch.rand(tokens.shape) < KEPT_IMAGE_TOKENS)
        scalings = torch.zeros(*tokens.shape, len(skills))
        for row, index in enumerate(indices):
            if (skill := rows[index % len(rows)]) != NONE:
                scalings[row, :, skills.index(skill)] = questions.field("known", [index])[0].float()
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
