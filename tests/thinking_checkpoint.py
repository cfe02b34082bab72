"""Makes any small checkpoint one whose model thinks, with a chat template like those of Qwen3."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer

START, END = "<think>", "</think>"

_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and message.reasoning_content %}"
    "<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "\n{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif enable_thinking is defined %}<think>\n{% endif %}{% endif %}"
)
"""Shows thoughts of earlier answers. `enable_thinking` begins thoughts in the prompt, and if false ends them there."""


def teach_thoughts(folder: Path, *, special: bool = False) -> Path:
    """Give a checkpoint's tokenizer the markers, and write the template. special: whether they are special tokens."""
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens([AddedToken(marker, special=special, normalized=False) for marker in (START, END)])
    tokenizer.save(path)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder
