"""Train pixie's adapters: python -m training.pixie.adapters --out runs/adapters

LoRA adapters of the language model, one for each of `skills.SKILLS`, and then an X-LoRA classifier that mixes them
(`mixture.py`) and its router. PEFT does both; images go through the vision tower once, before. `--evaluate` asks
held-out questions through vlmserve: pixie itself, each adapter, and the mixture.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration

from training.pixie.export import IMAGE_TOKENS
from training.pixie.model import seen
from training.pixie.precision import autocast
from training.pixie.rows import BROAD, KINDS, apart, branching, pack, squash
from training.pixie.skills import SKILLS, sample_questions, sample_skill
from training.pixie.tokenizer import ASSISTANT, BOS, IMAGE, encode_example
from vlmserve.models.hub import resolve_model
from vlmserve.pixie.evaluation import messages_of
from vlmserve.pixie.phrasings import SYSTEM_PROMPTS
from vlmserve.pixie.questions import Example, sample_example, single, text_only
from vlmserve.pixie.scenes import HELD_OUT_SEEDS, sample_scene

RANK: Final = 8
TARGETS: Final = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
WARM_UP_STEPS = 20
RATE = 4e-3
IMAGES_AT_ONCE = 64
QUESTIONS_OF_ROW: Final = 8
"""At most; fewer if the row is full."""
MIXTURE: Final = "skills"
NONE: Final = "none"
"""What is trained and asked without an adapter: questions that pixie itself knows."""
TEXT: Final = "text"
"""What pixie refuses: questions without an image."""
SIGNS: Final = {"german": r"^(Wel|Wie|Was)", "json": "JSON", "corners": "corners"}
"""Which words of a question tell that it needs a skill: a classifier cannot know it before."""
EVERYWHERE: Final = 0.4
"""The share of rows in which an adapter changes all tokens, as it does when it is served alone. In the others it
changes those that a classifier gives it: `known`."""
UNSURE: Final = 0.4, 1.2
"""And about as much as a classifier gives it."""

console = Console()


class Questions:
    """Packed rows (`rows.pack`) and their images' embeddings. A row has questions of one skill, or `NONE`, about one
    image, or of `TEXT`."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, skills: Sequence[str], count: int) -> None:
        rows, images = [], []
        for number in range(count):
            examples = ask(number, skills[number % len(skills)])
            rows.append(_packed(tokenizer, examples))
            rows[-1]["known"] = known(tokenizer, rows[-1], skills[number % len(skills)])
            scene = examples[0].scenes[0] if examples[0].scenes else sample_scene(number)
            images.append(squash(scene))
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
            self.field(name, indices) for name in ("tokens", "positions", "branches", "groups", "said")
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

    def field(self, name: str, indices: Sequence[int]) -> Tensor:
        """An array of `rows.pack`, or "known", of rows, ``[rows, length]``."""
        return self._rows[name][list(indices)]

    def reach(self, indices: Sequence[int], rng: random.Random) -> Tensor:
        """How much an adapter that is trained changes each token, ``[rows, length]``."""
        rows = []
        for index in indices:
            row = {name: values[index] for name, values in self._rows.items()}
            if rng.random() < EVERYWHERE:
                rows.append(torch.ones(row["tokens"].shape))
                continue
            late = row["known"].roll(rng.randrange(3)) | row["said"] | (row["tokens"] == ASSISTANT)
            rows.append((row["known"] & late) * torch.empty(len(late)).uniform_(*UNSURE))
        return torch.stack(rows)


def ask(number: int, skill: str) -> list[Example]:
    """Questions of a skill, or `NONE`, about one image, or of `TEXT` about none."""
    rng = random.Random(number)
    if skill == TEXT:
        return [text_only(rng) for _ in range(QUESTIONS_OF_ROW)]
    if skill != NONE:
        return sample_questions(number, skill, QUESTIONS_OF_ROW)
    scene = sample_scene(number * 64, rng.choices(KINDS, BROAD.kinds)[0])
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None
    text_first = rng.random() < 0.25
    return [replace(single(scene, rng), text_first=text_first, system=system) for _ in range(QUESTIONS_OF_ROW)]


def known(tokenizer: Tokenizer, row: Mapping[str, Any], skill: str) -> Any:
    """Which tokens of a packed row come with or behind the words that tell the skill, bool ``[length]``; no images,
    which are the same for all skills."""
    found = np.zeros(len(row["tokens"]), np.bool_)
    if skill not in SIGNS:
        return found
    for group, branch in set(zip(row["groups"], row["branches"], strict=True)):
        said: list[int] = []
        for place in np.flatnonzero((row["groups"] == group) & (row["branches"] == branch)) if branch else ():
            said.append(int(row["tokens"][place]))
            behind = len(said) > 1 and found[place - 1]
            found[place] = behind or re.search(SIGNS[skill], tokenizer.decode(said)) is not None
    return found & (row["tokens"] != IMAGE)


class Reach:
    """Limits the adapter of a model to some tokens. values: ``[rows, length]``, what its change is multiplied with."""

    def __init__(self, model: nn.Module) -> None:
        self.values: Tensor | None = None
        for name, module in model.named_modules():
            if name.endswith("lora_A.default"):
                module.register_forward_hook(self._limit)

    def _limit(self, module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor | None:
        return None if self.values is None else outputs * self.values[..., None].to(outputs.dtype)


def _packed(tokenizer: Tokenizer, examples: Sequence[Example]) -> dict[str, Any]:
    """A row: conversations that branch off behind their image, or two with the image behind the question."""
    if not examples[0].scenes:
        texts = [encode_example(tokenizer, example) for example in examples]
        return pack([([BOS], [(ids[1:], said[1:]) for ids, said in texts])])
    if examples[0].text_first:
        return pack([apart(tokenizer, example) for example in examples[:2]])
    return pack([branching(tokenizer, examples)])


def train(model: PeftModel, questions: Questions, count: int, steps: int, batch: int) -> None:
    """Teach the adapter to say the answers."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    embeddings = model.get_input_embeddings()
    random_ = random.Random(0)
    reach = Reach(model)
    started, shown = time.monotonic(), 0.0
    for step in range(steps):
        indices = [random_.randrange(count) for _ in range(batch)]
        inputs, tokens, said = questions.batch(indices, embeddings)
        reach.values = questions.reach(indices, random_)
        with autocast():
            logits = model(**inputs, use_cache=False).logits
        targets = tokens[:, 1:][said[:, 1:]]
        loss = F.cross_entropy(logits[:, :-1][said[:, 1:]].float(), targets)
        loss.backward()
        scale = min(1.0, (step + 1) / WARM_UP_STEPS) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = RATE * scale
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
    train(adapted, questions, count, steps, batch)
    adapted.save_pretrained(out / skill)
    tidy(out / skill)


def tidy(folder: Path) -> None:
    """Keep what serving needs: tensors in bfloat16 and a configuration without paths of this machine."""
    path = folder / "adapter_model.safetensors"
    save_file({name: value.to(torch.bfloat16).contiguous() for name, value in load_file(path).items()}, path)
    path.chmod(0o644)
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text())
    content |= {"base_model_name_or_path": "pixie", "inference_mode": True}
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)


def evaluate(out: Path, count: int) -> dict[str, dict[str, float]]:
    """The share of held-out questions of each skill, and of those that pixie knows, that are answered exactly right: by
    pixie itself, by the skill's adapter, and by the mixture, as far as they are there."""
    from vlmserve import LLM, LoRARequest, SamplingParams

    llm = LLM("pixie", enable_lora=True, dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=48)
    scores: dict[str, dict[str, float]] = {}
    for skill in (*SKILLS, NONE):
        seeds = range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + count)
        examples = [sample_example(seed) if skill == NONE else sample_skill(seed, skill) for seed in seeds]
        conversations = [messages_of(example) for example in examples]
        scores[skill] = {}
        for name in ("pixie", skill, MIXTURE):
            if name != "pixie" and not (out / name).is_dir():
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
        "--skills", nargs="*", default=list(SKILLS), metavar="SKILL", help="adapters to train; default: all"
    )
    parser.add_argument("--steps", type=int, default=300, help="of each adapter")
    parser.add_argument("--batch", type=int, default=12, help="images of a step, each with up to eight questions")
    parser.add_argument("--mixture-images", type=int, default=700, help="for the classifier; 0: train none")
    parser.add_argument("--mixture-steps", type=int, default=280, help="of the router, with the classifier")
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
        if options.mixture_images:
            from training.pixie.mixture import train_mixture

            console.print("Classifier")
            if not options.resume:
                shutil.rmtree(options.out / MIXTURE, ignore_errors=True)
            train_mixture(tokenizer, options.out, options.mixture_images, router_steps=options.mixture_steps)
    evaluate(options.out, options.questions)


if __name__ == "__main__":
    main()
