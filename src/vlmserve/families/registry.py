"""All families, found by importing every module of this package."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterator

from vlmserve import families as package
from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.families.family import FIXED_SIZE, LanguageFamily, VisionFamily, vision_section
from vlmserve.families.gguf import GGUFText
from vlmserve.families.retrievers import retriever_of
from vlmserve.families.spec import ArchSpec, Config

LANGUAGE_FAMILIES: dict[str, LanguageFamily] = {}
"""By ``model_type``."""
VISION_FAMILIES: dict[str, VisionFamily] = {}
"""By `VisionFamily.key`."""

_CLASSIFIER = "ForSequenceClassification"
_HEADLESS = "Model"
_GENERATORS = ("ForCausalLM", "ForConditionalGeneration")
"""Endings of architectures: classifiers, models without a head, and generating models."""
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Values of ``model_type`` of models that only draft for others."""
DEFAULT_FAMILY = "llama"
"""Family of a config without a ``model_type``, as the first LLaVA checkpoints have it."""


def register(family: LanguageFamily | VisionFamily) -> None:
    """Replaces a family of the same name."""
    if isinstance(family, VisionFamily):
        VISION_FAMILIES[family.key] = family
    else:
        LANGUAGE_FAMILIES[family.model_type] = family


def language_family(config: Config) -> LanguageFamily:
    """Raises UnsupportedModelError for an unknown family."""
    name = config.get("model_type", DEFAULT_FAMILY)
    if name not in LANGUAGE_FAMILIES:
        raise UnsupportedModelError(
            f"language model type {name!r} is not supported; supported are {', '.join(sorted(LANGUAGE_FAMILIES))}"
        )
    return LANGUAGE_FAMILIES[name]


def decoder_spec(config: Config) -> ArchSpec:
    """The spec of a text config (all of config.json or its ``text_config``).

    Raises UnsupportedModelError for an unsupported family or option, ModelLoadError for impossible sizes.
    """
    family = language_family(config)
    return family.build({**family.defaults, **config})


def vision_family(config: Config) -> VisionFamily | None:
    """The family of a model with a vision tower. None for other and unknown models."""
    found = _known_architecture(config)
    fitting = [family for family in VISION_FAMILIES.values() if family.architecture == found]
    special = (family for family in fitting if family.matches is not None and family.matches(config))
    return next(special, next((family for family in fitting if family.matches is None), None))


def vision_config(config: Config) -> Config:
    """``vision_config`` with the family's defaults."""
    family = vision_family(config)
    return vision_section(config) if family is None else family.vision_config(config)


def gguf_family(name: str) -> tuple[LanguageFamily, GGUFText] | None:
    found = ((family, family.gguf[name]) for family in LANGUAGE_FAMILIES.values() if name in family.gguf)
    return next(found, None)


def image_processor_path(kind: str | None, family: VisionFamily | None) -> str:
    """The image processor's path. kind: the checkpoint's ``image_processor_type``.

    Without a kind, the family decides. Unknown kinds mean a fixed image size.
    """
    if kind is None and family is not None:
        return family.image_processor
    named = (own for own in VISION_FAMILIES.values() if str(kind).startswith(own.image_processor_types))
    return next((own.image_processor for own in named), FIXED_SIZE)


def family_of(config: Config) -> LanguageFamily | VisionFamily | None:
    name = str(config.get("model_type"))
    return vision_family(config) or LANGUAGE_FAMILIES.get(name)


def architecture(config: Config) -> str:
    """The architecture of a config.json. Raises UnsupportedModelError for an unknown one, ModelLoadError for none."""
    if found := _known_architecture(config):
        return found
    if not config.get("architectures") and "model_type" not in config:
        raise ModelLoadError("config.json names neither architectures nor a model_type")
    if config.get("model_type") in ASSISTANTS:
        raise ModelLoadError(
            "this model only drafts for another one: load the other one, and this one by --draft-model"
        )
    name = _named_architectures(config)[0]
    supported = architectures()
    near = difflib.get_close_matches(name, supported, cutoff=0.7)
    hint = f", {' and '.join(near)} would be" if near else ""
    raise UnsupportedModelError(f"architecture {name!r} is not supported{hint}; all that are: {', '.join(supported)}")


def architectures() -> list[str]:
    return sorted({family.architecture for family in families() if family.architecture is not None})


def families() -> Iterator[LanguageFamily | VisionFamily]:
    yield from VISION_FAMILIES.values()
    yield from LANGUAGE_FAMILIES.values()


def classifies(config: Config) -> bool:
    """Return whether the model is a decoder with a classification head."""
    return any(name.endswith(_CLASSIFIER) for name in _named_architectures(config))


def _known_architecture(config: Config) -> str | None:
    others = {other: family.architecture for family in families() for other in family.other_architectures}
    known = architectures()
    is_causal = config.get("is_causal") is not False and not config.get("use_bidirectional_attention")
    endings = (_CLASSIFIER, _HEADLESS) if is_causal else (_CLASSIFIER,)
    named: list[str] = []
    for name in _named_architectures(config):
        generators = [
            f"{name.removesuffix(end)}{head}" for end in endings if name.endswith(end) for head in _GENERATORS
        ]
        named += [name, *generators]
    return next((name for name in (others.get(n, n) for n in named) if name in known), None)


def _named_architectures(config: Config) -> list[str]:
    """``architectures`` of config.json, else the architecture of its ``model_type``. Never empty. In a retriever, the
    ``model_type`` names the vision-language model.
    """
    named = config.get("architectures")
    if isinstance(named, list) and named and retriever_of(config) is None:
        return [str(name) for name in named]
    kind = config.get("model_type")
    own = (family.architecture for family in families() if family.model_type == kind)
    return [next((name for name in own if name is not None), str(kind))]


for _module in pkgutil.iter_modules(package.__path__):
    if _module.name != "registry":
        for _family in getattr(importlib.import_module(f"{package.__name__}.{_module.name}"), "FAMILIES", ()):
            register(_family)
