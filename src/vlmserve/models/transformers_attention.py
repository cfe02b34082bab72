"""Our attention for transformers' layers, registered through its attention interface.

See https://huggingface.co/docs/transformers/attention_interface.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from vlmserve.errors import UnsupportedModelError
from vlmserve.layer_specs import AttentionSpec

NAME = "vlmserve"
"""The name of our attention among transformers' implementations."""
NO_INTERFACE = "its layers do not attend by transformers' attention interface"

Attend = Callable[[Tensor, Tensor, Tensor, Callable[[], AttentionSpec]], Tensor]
"""Attention of queries, keys and values. The function returns the layer's spec."""
_attend: ContextVar[Attend | None] = ContextVar("attend", default=None)
_masked: ContextVar[list[int] | None] = ContextVar("masked", default=None)
"""Collects the windows of masks that transformers asks for, unless None."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention with transformers' signature: each ``[1, heads, tokens, size]``, to ``[1, tokens, heads, size]``."""
    attend = _attend.get()
    if attend is None:
        raise UnsupportedModelError(f"{type(module).__name__} attends outside of the language model")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} has a mask or a bias of its own")
    head_size, value_size = query.shape[-1], value.shape[-1]
    if value_size > head_size:
        raise UnsupportedModelError(f"{type(module).__name__} has values that are wider than its keys")
    num_heads, num_kv_heads = query.shape[1], key.shape[1]

    def spec() -> AttentionSpec:
        return AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=head_size**-0.5 if scaling is None else float(scaling),
            window=sliding_window or getattr(module, "sliding_window", None),
            soft_cap=softcap,
            sinks=None if s_aux is None else tuple(s_aux.tolist()),
        )

    if value_size < head_size:  # as in latent attention
        value = nn.functional.pad(value, (0, head_size - value_size))
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    output = attend(query, key, value, spec).view(1, -1, num_heads, head_size)
    return output[..., :value_size], None


def _mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> None:
    """Transformers calls it to make masks, which our attention does not need. Records their windows."""
    if local_size is None or (windows := _masked.get()) is None:
        return
    first, later = torch.tensor(1), torch.tensor(local_size)
    if not bool(mask_function(0, 0, later, first)):
        raise UnsupportedModelError(f"attention in chunks of {local_size} tokens is not supported")
    windows.append(local_size)


@contextlib.contextmanager
def attending(attend: Attend, windows: list[int] | None = None) -> Iterator[None]:
    tokens = _attend.set(attend), _masked.set(windows)
    try:
        yield
    finally:
        _attend.reset(tokens[0])
        _masked.reset(tokens[1])


def register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def attention_by_part(config: Any) -> dict[str, str]:
    """Use our attention in the language model and torch's in the vision tower."""
    return {"": NAME, **{name: NAME if name == "text_config" else "sdpa" for name in config.sub_configs}}
