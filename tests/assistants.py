"""Assistants of small Gemma 4 checkpoints, and their drafts by transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from tests.checkpoints import TEXT, change_config, change_tensors
from tests.models.test_families import GEMMA4
from tests.saved_models import save_model

CHOSEN = 3
"""Clusters whose tokens are compared."""


def _allow_sharing_by_all(kind: Any) -> None:
    """transformers 5.23 rejects configs whose layers all share keys, as those of its assistants do, and keeps no keys
    for an assistant if no layer shares any."""
    theirs = kind.kv_sharing_modes.fget

    def modes(config: Any) -> list[str | None]:
        count = config.num_hidden_layers
        if config.num_kv_shared_layers == count:
            return ["reuse"] * count
        last = {name: number for number, name in enumerate(config.layer_types)}.values()
        if not config.num_kv_shared_layers:
            return ["store" if number in last else None for number in range(count)]
        found: list[str | None] = theirs(config)
        return found

    kind.kv_sharing_modes = property(modes)


_allow_sharing_by_all(transformers.Gemma4TextConfig)
_allow_sharing_by_all(transformers.Gemma4UnifiedTextConfig)


def make_assistant(folder: Path, target: Path, *, clusters: bool = False, **text: Any) -> Path:
    """clusters: tokens are in clusters. text: fields of the assistant's own config."""
    config = json.loads((target / "config.json").read_text())
    decoder = config.get("text_config", config)
    count = text.get("num_hidden_layers", 4)
    sizes = {
        **{name: TEXT[name] for name in ("rms_norm_eps", "max_position_embeddings", "initializer_range")},
        **{name: GEMMA4[name] for name in ("head_dim", "global_head_dim", "sliding_window")},
        "num_key_value_heads": decoder["num_key_value_heads"],
        "hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": count,
        "num_kv_shared_layers": count, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "vocab_size": decoder["vocab_size"], "vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0,
        "pad_token_id": 0, **text,
    }  # fmt: skip
    sizes["layer_types"] = [*sizes["layer_types"][: sizes["num_hidden_layers"] - 1], "full_attention"]
    unified = "Unified" * ("unified" in decoder["model_type"])
    made = getattr(transformers, f"Gemma4{unified}AssistantConfig")(
        text_config={"model_type": decoder["model_type"], **sizes}, use_ordered_embeddings=clusters,
        backbone_hidden_size=decoder["hidden_size"], num_centroids=_clusters(sizes["vocab_size"]),
        centroid_intermediate_top_k=CHOSEN,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    save_model(folder, getattr(transformers, f"Gemma4{unified}AssistantForCausalLM"), made, seed=5)
    change_config(folder, text_config={**made.text_config.to_dict(), "num_kv_shared_layers": 0})
    if clusters:
        order = torch.randperm(sizes["vocab_size"], generator=torch.Generator().manual_seed(0))
        change_tensors(folder, lambda name, one: (name, order if name.endswith("token_ordering") else one))
    return folder


def _clusters(vocabulary: int) -> int:
    return max(count for count in range(1, 65) if vocabulary % count == 0)


def make_counting(target: Path, assistant: Path) -> None:
    """Change both: the next token, also the predicted one, is the last token plus 1."""
    for folder in (target, assistant):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")):
                tensor.zero_()
            if name.endswith(("norm.weight", "layer_scalar")):
                tensor.fill_(1.0)
        save_file(tensors, path, {"format": "pt"})
    whole, own = (load_file(folder / "model.safetensors") for folder in (target, assistant))
    embeddings = F.normalize(whole["model.embed_tokens.weight"])
    whole["model.embed_tokens.weight"], whole["lm_head.weight"] = embeddings, embeddings.roll(1, 0).contiguous()
    size = embeddings.shape[1]
    own["model.embed_tokens.weight"] = embeddings.roll(1, 0).contiguous()
    own["pre_projection.weight"] = torch.eye(size, 2 * size)
    own.pop("lm_head.weight", None)
    for folder, tensors in ((target, whole), (assistant, own)):
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


class Reference:
    """Transformers' drafts. Its assistant sees a window one token longer than the model's, so keys are cut."""

    def __init__(self, target: transformers.PreTrainedModel, assistant: Path) -> None:
        self._target = target
        [name] = json.loads((assistant / "config.json").read_text())["architectures"]
        self._assistant = getattr(transformers, name).from_pretrained(assistant, dtype=torch.float32).eval()
        self._window = self._assistant.config.text_config.sliding_window

    @torch.inference_mode()
    def chain(self, known: Sequence[int], count: int) -> list[int]:
        """The `count` drafts after `known` tokens."""
        ids = torch.tensor([known])
        outputs = self._target(input_ids=ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
        states = outputs.shared_kv_states
        states["sliding_attention"] = tuple(one[:, :, -self._window :] for one in states["sliding_attention"])
        hidden, token, drafts = outputs.hidden_states[-1][:, -1:], ids[:, -1:], list[int]()
        for _ in range(count):
            embedded = self._target.get_input_embeddings()(token)
            made = self._assistant(
                inputs_embeds=torch.cat((embedded, hidden), -1), shared_kv_states=states,
                position_ids=torch.tensor([[len(known) - 1]]), use_cache=False,
            )  # fmt: skip
            token, hidden = made.logits.argmax(-1), made.last_hidden_state
            drafts.append(int(token))
        return drafts
