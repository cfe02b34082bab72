"""Explains arguments of other libraries that `LLM` lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from vlmserve.settings.validation import did_you_mean


def check_arguments(method: Callable[..., Any], others: Mapping[str, Any]) -> None:
    """Raise TypeError with a suggestion for unknown arguments. Arguments that are None pass."""
    known = [name for name in signature(method).parameters if name not in ("self", "others")]
    for name, value in others.items():
        if value is not None and name not in _HARMLESS:
            instead = _INSTEAD.get(name) or did_you_mean(name, known)
            raise TypeError(f"{method.__name__}() has no argument {name}{instead}")


_HARMLESS = ("use_tqdm", "priority", "chat_template_content_format")
"""Arguments of other methods or libraries that change no answer."""
_INSTEAD: Mapping[str, str] = {
    "chat_template": "; give chat_template to LLM",
    "prompt_token_ids": '; give the prompt as {"prompt_token_ids": [...]}',
    "multi_modal_data": '; give the prompt as {"prompt": text, "multi_modal_data": {...}}',
    "images": '; give the prompt as {"prompt": text, "multi_modal_data": {"image": images}}',
    "tools": "; serve the model to call tools",
}
"""Advice for arguments of other libraries and older versions of vLLM."""
