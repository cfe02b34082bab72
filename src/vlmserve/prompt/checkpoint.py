"""Special tokens, chat template, placeholders and end tokens of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmserve.errors import ModelLoadError
from vlmserve.families.family import VisionFamily
from vlmserve.families.registry import family_of
from vlmserve.families.retrievers import retriever_of
from vlmserve.gguf.pair import language_model
from vlmserve.prompt import gguf
from vlmserve.prompt.files import EXTRA_TEMPLATES, PromptFiles, read_config, read_json

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_prompt_files(folder: Path) -> PromptFiles:
    """Read a folder or a GGUF file. Raises ModelLoadError for broken files."""
    file = language_model(folder)
    of_file = None if file is None else gguf.read_prompt_files(file)
    if of_file is not None and file == folder:
        return of_file
    config, generation_config = read_config(folder), read_json(folder / "generation_config.json")
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    family = family_of(config)
    special: Mapping[str, str] = _special_tokens(tokenizer_config, read_json(folder / "special_tokens_map.json"))
    templates, end_token_ids = _chat_templates(folder, tokenizer_config), _end_token_ids(generation_config, config)
    template, tool_template = templates.get("default"), templates.get("tool_use")
    if of_file is not None:
        special, end_token_ids = of_file.special_tokens, of_file.end_token_ids
        template, tool_template = of_file.chat_template, of_file.tool_template
    if not template and family is not None and family.chat_template is not None:
        template = family.chat_template(config, generation_config)
    if (retriever := retriever_of(config)) is not None:
        template = tool_template = retriever.document_template
    files = PromptFiles(
        tokenizer_config=tokenizer_config,
        special_tokens=special,
        image_token_id=None,
        chat_template=template,
        tool_template=tool_template,
        end_token_ids=end_token_ids,
        converter=family.tokenizer if family is not None else None,
        has_own_preprocessing=False,
    )
    if isinstance(family, VisionFamily):
        return _with_images(files, family, config)
    if "vision_config" not in config:
        return files
    return replace(files, image_token_id=config.get("image_token_id", config.get("image_token_index")))


def _with_images(files: PromptFiles, family: VisionFamily, config: Mapping[str, Any]) -> PromptFiles:
    video = family.video_token_id
    return replace(
        files,
        image_token_id=family.placeholder(config),
        video_token_id=None if video is None else config.get("video_token_id", video),
        image_ends=_pair(config, family.image_ends),
        frame_ends=_pair(config, family.frame_ends),
        frames_are_images=family.frames_are_images,
        has_own_preprocessing=True,
    )


def _pair(config: Mapping[str, Any], defaults: Mapping[str, int]) -> tuple[int, int] | None:
    if not defaults:
        return None
    first, last = (config.get(name, default) for name, default in defaults.items())
    return first, last


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for source in sources:
        own = source.get("model_specific_special_tokens") or source.get("extra_special_tokens")
        named = {name: source.get(name) for name in SPECIAL_TOKEN_NAMES}
        for name, value in {**named, **(own if isinstance(own, dict) else {})}.items():
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens.setdefault(name, content)
    return tokens


def _chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return templates by name; "tool_use" is for requests with tools."""
    extra = sorted((folder / EXTRA_TEMPLATES).glob("*.jinja"))
    files = {path.stem: path for path in extra} | {"default": folder / "chat_template.jinja"}
    named = {name: path.read_text(encoding="utf-8-sig") for name, path in files.items() if path.is_file()}
    if "default" in named:
        return named
    template: Any = None
    for source in (
        read_json(folder / "chat_template.json"),
        read_json(folder / "processor_config.json"),
        tokenizer_config,
    ):
        template = template or source.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    templates = template if isinstance(template, dict) else {"default": template}
    return {name: source for name, source in templates.items() if isinstance(source, str)} | named


def _end_token_ids(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> frozenset[int]:
    for source in (generation_config, config, config.get("text_config")):
        ids = source.get("eos_token_id") if isinstance(source, Mapping) else None
        if isinstance(ids, int):
            return frozenset({ids})
        if isinstance(ids, list) and ids:
            if not all(isinstance(token_id, int) for token_id in ids):
                raise ModelLoadError(f"eos_token_id is {ids!r}, not token ids; correct the checkpoint's files")
            return frozenset(ids)
    return frozenset()
