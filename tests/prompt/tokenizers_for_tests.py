"""Small tokenizers of the kinds that checkpoints have, and checkpoint folders around them (without weights)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "What is in the picture? A red circle and two blue squares on a white background.",
    "How many green triangles are there? There are three. Describe the image, please: USER ASSISTANT system.",
    "The number is 42. hello world, the quick brown fox jumps over the lazy dog! naïve café 日本語 😀",
] * 3

LLAVA_STYLE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""The way published LLaVA checkpoints write it: parts only, images first."""

CHATML_STRINGS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{{ message.content | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Strings only, and stripped."""

CHATML_PARTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Both forms, images where they stand."""

SPECIAL = ["<unk>", "<s>", "</s>", "<image>", "<|im_start|>", "<|im_end|>"]


def _special(tokens: list[str]) -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in tokens]


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """Byte-level BPE, like GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_special(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def sentencepiece(prepend_scheme: str = "first", *, legacy: bool = False) -> Tokenizer:
    """BPE with byte fallback, like Llama 2 (`legacy`: as its tokenizer.json was written first) and Mistral."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL + byte_tokens, show_progress=False)
    trained.train_from_iterator([text.encode("ascii", "ignore").decode() for text in CORPUS], trainer)
    state = json.loads(trained.to_str())
    state["added_tokens"] = []
    state["model"] |= {"byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(_special(SPECIAL))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = None
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    strip = [] if prepend_scheme == "never" else [decoders.Strip(content=" ", left=1)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def word_level() -> Tokenizer:
    """Whole words, the placeholder among them; no decoder."""
    words = sorted({word for text in CORPUS for word in text.replace("?", " ?").replace(".", " .").split()})
    vocab = {word: index for index, word in enumerate([*SPECIAL, *words, "<", ">", "image"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(_special(SPECIAL))
    return tokenizer


def write_checkpoint(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    chat_template: str | list[dict[str, str]] | None = CHATML_PARTS,
    takes_images: bool = True,
    config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    image_processor: dict[str, Any] | None = None,
) -> Path:
    """A folder of a LLaVA (else Llama) checkpoint without weights: 28-pixel images of 4 placeholders."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    image_id = tokenizer.token_to_id("<image>")
    base: dict[str, Any] = {"model_type": "llama", "eos_token_id": 2}
    if takes_images:
        base = {
            "model_type": "llava",
            "image_token_index": image_id,
            "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
            "text_config": {"model_type": "llama", "eos_token_id": 2},
        }
        processor = {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
            **(image_processor or {}),
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        sizes = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor", **sizes}))
    (folder / "config.json").write_text(json.dumps({**base, **(config or {})}))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **(tokenizer_config or {})}
    if isinstance(chat_template, list):
        named["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    if isinstance(chat_template, str):
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder
