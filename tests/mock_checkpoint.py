"""A checkpoint folder without a model, for the mock engine: tokenizer, chat template and processor settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTEXT = 512
IMAGE_TOKENS = 4
END_TOKEN_ID = 1
IMAGE_TOKEN_ID = 2

_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_TEXT = "user: assistant: What is in the picture? there is one red square and two blue circles on the left of a star"


def make_mock_checkpoint(
    folder: Path, *, supports_images: bool = True, context: int = CONTEXT, special: Sequence[str] = ()
) -> Path:
    """Write the files into `folder`, which must exist. special: more special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>", "<image>", *special)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=added, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_TEXT] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {"max_position_embeddings": context, "vocab_size": tokenizer.get_vocab_size()}
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
    config = {"model_type": "llava", "text_config": text, "vision_config": vision, "image_token_index": IMAGE_TOKEN_ID}
    if not supports_images:
        config = {"model_type": "llama", **text}
    size = {"height": 28, "width": 28}
    processor = {"image_processor_type": "CLIPImageProcessor", "size": size, "crop_size": size}
    for name, value in {
        "config.json": config,
        "generation_config.json": {"eos_token_id": END_TOKEN_ID, "do_sample": False},
        "preprocessor_config.json": processor,
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"},
    }.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    (folder / "model.safetensors").touch()
    return folder
