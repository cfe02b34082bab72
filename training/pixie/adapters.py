"""Train pixie's adapters: python -m training.pixie.adapters --out runs/adapters

LoRA adapters of the language model, one for each of `skills.SKILLS`, and then an X-LoRA classifier that mixes them, the
adapters frozen. PEFT does both; images go through the vision tower once, before. `--evaluate` asks held-out questions
through vlmserve: pixie itself, each adapter, and the mixture.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, XLoraConfig, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration

from training.pixie.export import IMAGE_TOKENS
from training.pixie.model import seen
from training.pixie.rows import apart, branching, pack, squash
from training.pixie.tokenizer import IMAGE
from vlmserve.models.hub import resolve_model
from vlmserve.pixie.evaluation import messages_of
from vlmserve.pixie.questions import Example
from vlmserve.pixie.scenes import HELD_OUT_SEEDS
from vlmserve.pixie.skills import SKILLS, sample_questions, sample_skill

RANK: Final = 8
TARGETS: Final = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
WARM_UP_STEPS = 20
LORA_RATE, CLASSIFIER_RATE = 4e-3, 5e-3
IMAGES_AT_ONCE = 64
QUESTIONS_OF_ROW: Final = 8
"""At most; fewer if the row is full."""
MIXTURE: Final = "mixed"

console = Console()


class Questions:
    """Packed rows (`rows.pack`), each of questions of one skill about one image, and the images' embeddings."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, skills: Sequence[str], count: int) -> None:
        rows, images = [], []
        for number in range(count):
            examples = sample_questions(number, skills[number % len(skills)], QUESTIONS_OF_ROW)
            rows.append(_packed(tokenizer, examples))
            images.append(squash(examples[0].scenes[0]))
        self._rows = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
        parts = []
        with torch.inference_mode():
            for start in range(0, count, IMAGES_AT_ONCE):
                pixels = torch.from_numpy(np.stack(images[start : start + IMAGES_AT_ONCE])).permute(0, 3, 1, 2)
                features = model.get_image_features(pixels.float() / 127.5 - 1).pooler_output
                parts += [one.half() for one in features]
        self._features = parts

    def batch(self, indices: Sequence[int], embeddings: nn.Embedding) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """What the model takes: embeddings ``[rows, length, width]``, positions, and which tokens see which. And the
        tokens, and those of them that are to be said, ``[rows, length]``."""
        tokens, positions, branches, groups, said = (
            self._rows[name][list(indices)] for name in ("tokens", "positions", "branches", "groups", "said")
        )
        tokens = tokens.long()
        features = [
            self._features[i].repeat(int((t == IMAGE).sum()) // IMAGE_TOKENS, 1)
            for i, t in zip(indices, tokens, strict=True)
        ]
        inputs = embeddings(tokens).detach()
        inputs = inputs.masked_scatter((tokens == IMAGE)[..., None], torch.cat(features).float())
        return (
            {"inputs_embeds": inputs, "position_ids": positions.long(), "attention_mask": seen(groups, branches)},
            tokens,
            said,
        )


def _packed(tokenizer: Tokenizer, examples: Sequence[Example]) -> dict[str, Any]:
    """A row: conversations that branch off behind their image, or two with the image behind the question."""
    if examples[0].text_first:
        return pack([apart(tokenizer, example) for example in examples[:2]])
    return pack([branching(tokenizer, examples)])


def train(model: PeftModel, questions: Questions, count: int, steps: int, batch: int, rate: float) -> None:
    """Teach whatever in the model can be trained to say the answers."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    embeddings = model.get_input_embeddings()
    random_ = random.Random(0)
    started, shown = time.monotonic(), 0.0
    for step in range(steps):
        indices = [random_.randrange(count) for _ in range(batch)]
        inputs, tokens, said = questions.batch(indices, embeddings)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**inputs, use_cache=False).logits
        targets = tokens[:, 1:][said[:, 1:]]
        loss = F.cross_entropy(logits[:, :-1][said[:, 1:]].float(), targets)
        loss.backward()
        scale = min(1.0, (step + 1) / WARM_UP_STEPS) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.item() if step == 0 else 0.95 * shown + 0.05 * loss.item()
        if step % 25 == 24 or step + 1 == steps:
            console.print(f"step {step + 1}: loss {shown:.4f}, {time.monotonic() - started:.0f} s", highlight=False)


def base_model() -> Any:
    model = LlavaForConditionalGeneration.from_pretrained(resolve_model("pixie"), dtype=torch.float32)
    model.config.use_cache = False
    return model.requires_grad_(False).eval()


def train_adapter(skill: str, tokenizer: Tokenizer, out: Path, *, steps: int, batch: int, count: int) -> None:
    """Write a LoRA adapter that teaches a skill by questions about `count` images, of which a step sees `batch`. Goes
    on from the adapter that is there."""
    model = base_model()
    questions = Questions(model.model, tokenizer, [skill], count)
    if (out / skill).exists():
        adapted = PeftModel.from_pretrained(model, out / skill, is_trainable=True)
    else:
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
        adapted = get_peft_model(model, config)
    train(adapted, questions, count, steps, batch, LORA_RATE)
    adapted.save_pretrained(out / skill)
    _tidy(out / skill)


def train_mixture(tokenizer: Tokenizer, out: Path, *, steps: int, batch: int, count: int) -> None:
    """Write an X-LoRA checkpoint over the adapters, which stay as they are."""
    model = base_model()
    questions = Questions(model.model, tokenizer, list(SKILLS), count)
    paths = {str(number): str(out / skill) for number, skill in enumerate(SKILLS)}
    config = XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=model.config.text_config.hidden_size, adapters=paths, xlora_depth=2,
        xlora_size=32, xlora_dropout_p=0.0, layerwise_scalings=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mixed = get_peft_model(model, config)
    train(mixed, questions, count, steps, batch, CLASSIFIER_RATE)
    folder = out / MIXTURE
    folder.mkdir(parents=True, exist_ok=True)
    # PEFT's save_pretrained leaves out layers of the classifier.
    kept = {name: value for name, value in mixed.state_dict().items() if "internal_xlora_classifier" in name}
    save_file({name: value.contiguous() for name, value in kept.items()}, folder / "adapter_model.safetensors")
    content = {key: value for key, value in config.to_dict().items() if value is not None}
    content["adapters"] = {number: Path(path).name for number, path in paths.items()}
    (folder / "adapter_config.json").write_text(json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")
    _tidy(folder)


def _tidy(folder: Path) -> None:
    """Keep what serving needs: tensors in bfloat16 and a configuration without paths of this machine."""
    path = folder / "adapter_model.safetensors"
    dtype = torch.float32 if folder.name == MIXTURE else torch.bfloat16
    save_file({name: value.to(dtype).contiguous() for name, value in load_file(path).items()}, path)
    path.chmod(0o644)
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text())
    content |= {"base_model_name_or_path": "pixie", "inference_mode": True}
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)


def evaluate(out: Path, count: int) -> dict[str, dict[str, float]]:
    """The share of held-out questions of each skill that are answered exactly right: by pixie itself, by the skill's
    adapter, and by the mixture, as far as they are there."""
    from vlmserve import LLM, LoRARequest, SamplingParams

    llm = LLM("pixie", enable_lora=True, dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=48)
    scores: dict[str, dict[str, float]] = {}
    for skill in SKILLS:
        if not (out / skill).is_dir():
            continue
        examples: list[Example] = [sample_skill(HELD_OUT_SEEDS + number, skill) for number in range(count)]
        conversations = [messages_of(example) for example in examples]
        scores[skill] = {}
        for name in ("pixie", skill, MIXTURE):
            if name == MIXTURE and not (out / name).is_dir():
                continue
            request = None if name == "pixie" else LoRARequest(name, 0, str(out / name))
            results = llm.chat(conversations, params, use_tqdm=False, lora_request=request)
            answers = [result.outputs[0].text.strip() for result in results]
            right = [answer == example.turns[0][1] for answer, example in zip(answers, examples, strict=True)]
            scores[skill][name] = sum(right) / count
        console.print(skill, {name: f"{score:.1%}" for name, score in scores[skill].items()})
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.pixie.adapters", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "runs" / "adapters")
    parser.add_argument(
        "--skills", nargs="*", default=list(SKILLS), choices=list(SKILLS), help="adapters to train; default: all"
    )
    parser.add_argument("--steps", type=int, default=300, help="of each adapter")
    parser.add_argument("--batch", type=int, default=12, help="images of a step, each with up to eight questions")
    parser.add_argument("--mixture-steps", type=int, default=200, help="0: train no classifier")
    parser.add_argument("--images", type=int, default=1500, help="images to draw for each training")
    parser.add_argument("--resume", action="store_true", help="go on from the adapters in --out")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate what is in --out")
    parser.add_argument("--questions", type=int, default=500, help="held-out questions of each skill")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(resolve_model("pixie") / "tokenizer.json"))
    torch.manual_seed(0)
    if not options.evaluate:
        for skill in options.skills:
            console.print(f"Adapter {skill}")
            if not options.resume:
                shutil.rmtree(options.out / skill, ignore_errors=True)
            sizes = {"batch": options.batch, "count": options.images}
            train_adapter(skill, tokenizer, options.out, steps=options.steps, **sizes)
        if options.mixture_steps:
            console.print("Classifier")
            sizes = {"batch": options.batch, "count": options.images}
            train_mixture(tokenizer, options.out, steps=options.mixture_steps, **sizes)
    evaluate(options.out, options.questions)


if __name__ == "__main__":
    main()
