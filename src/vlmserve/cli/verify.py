from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from PIL import Image
from rich.console import Console
from rich.table import Table

from vlmserve.errors import ConfigurationError
from vlmserve.frontend.wire import is_image_name
from vlmserve.media.images import decode_image
from vlmserve.models.hub import resolve_model
from vlmserve.pixie.drawing import draw_scene
from vlmserve.pixie.scenes import sample_scene
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.tools.verify import TOLERANCE, Comparison, Conversation, Ours, Theirs, compare, supports_images

QUESTIONS: Final = ("What is in the image?", "Describe the image.", "What colours do you see?")
TEXTS: Final = (
    "Hello! Who are you?",
    "Count from one to ten.",
    "What is the capital of France?",
    f"Continue: {'Every morning the captain looked at the sea and wrote down what he saw. ' * 4}",
)
MOST_IMAGES: Final = 8
VERDICTS: Final = {
    "same": "[green]the same tokens[/]",
    "near tie": "[green]the same[/] up to a near tie",
    "other prompt": "[red]another prompt[/]",
    "other logits": "[red]other logits[/]",
    "other tokens": "[red]other tokens[/]",
}


def run_verify(config: EngineConfig, images: Path | None, num_tokens: int) -> bool:
    """Print the differences; return whether both sides agree.

    Raises ConfigurationError for a folder without images or a model that takes none.
    """
    console = Console()
    folder = resolve_model(config.model, config.revision, config.mmproj)
    takes_images = supports_images(folder)
    if images is not None and not takes_images:
        raise ConfigurationError("--images: this model takes none")
    conversations = _conversations(images, takes_images=takes_images)
    config = config.model_copy(update={"dtype": "float32" if config.dtype == "auto" else config.dtype})
    with Console(stderr=True).status("Loading the model twice"):
        ours = Ours(config, folder)
        model = ours.model
        theirs = Theirs(folder, takes_images=takes_images, dtype=model.dtype, device=model.device.torch_device)
    tokenizer = Tokenizer.from_folder(folder)
    tolerance = TOLERANCE[model.dtype]
    table = Table("conversation", "prompt", "answer", "largest difference\nof a logit", "")
    comparisons: list[Comparison] = []
    with Console(stderr=True).status("") as status:
        for name, conversation in conversations.items():
            status.update(f"{name}: vlmserve")
            answer = ours.answer(conversation, num_tokens)
            status.update(f"{name}: transformers")
            comparison = compare(answer, theirs.answer(conversation, num_tokens), tolerance)
            comparisons.append(comparison)
            table.add_row(
                name, f"{len(answer.prompt_ids)}", f"{len(answer.token_ids)}", f"{comparison.error:.1e}",
                VERDICTS[comparison.verdict],
            )  # fmt: skip
    console.print(table)
    kind = str(model.dtype).removeprefix("torch.")
    console.print(
        f"{model.architecture}, {kind}, {model.device}. Differences are in standard deviations of a token's logits; "
        f"{tolerance:g} is allowed.",
        highlight=False,
    )
    wrong = [
        pair for pair in zip(conversations, comparisons, strict=True) if pair[1].verdict not in ("same", "near tie")
    ]
    if wrong:
        console.print(f"[red]Different[/]: {_first_difference(*wrong[0], tokenizer)}", highlight=False)
    else:
        console.print("[green]Same[/]: the engine and transformers agree.", highlight=False)
    return not wrong


def _first_difference(name: str, comparison: Comparison, tokenizer: Tokenizer) -> str:
    if comparison.verdict == "other prompt":
        return f"the prompts of {name!r} part at token {comparison.prompt_place}: template, tokenizer or image size"
    if comparison.gap is None:
        return f"the tokens of {name!r} are the same, but logits are {comparison.error:.2g} apart"
    place = comparison.place
    ours, theirs = (tokenizer.decode([side[place]]) for side in (comparison.ours, comparison.theirs))
    return (
        f"token {place} of the answer to {name!r} is {ours!r} instead of {theirs!r}, whose logits transformers has "
        f"{comparison.gap:.2g} apart"
    )


def _conversations(folder: Path | None, *, takes_images: bool) -> dict[str, Conversation]:
    conversations: dict[str, Conversation] = {text[:24]: [{"role": "user", "content": text}] for text in TEXTS}
    if not takes_images:
        return conversations
    images = _drawn() if folder is None else read_images(folder)
    asked: dict[str, Conversation] = {}
    for number, (name, image) in enumerate(images.items()):
        asked[name] = _question([image], QUESTIONS[number % len(QUESTIONS)])
    names = list(images)[:2]
    if len(names) == 2:
        asked[" and ".join(names)] = _question([images[name] for name in names], "What do the images show?")
    return asked | dict(list(conversations.items())[:1])


def _question(images: list[Image.Image], text: str) -> Conversation:
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def _drawn() -> dict[str, Image.Image]:
    sizes = {"a square": (384, 384), "a wide one": (640, 250), "a tall one": (180, 500)}
    return {name: draw_scene(sample_scene(number)).resize(size) for number, (name, size) in enumerate(sizes.items())}


def read_images(folder: Path) -> dict[str, Image.Image]:
    """Decode the first images of a folder, by name. Raises ConfigurationError if there are none."""
    if not folder.is_dir():
        raise ConfigurationError(f"--images {folder}: there is no such folder")
    files = sorted(path for path in folder.iterdir() if path.is_file() and is_image_name(path.name))[:MOST_IMAGES]
    if not files:
        raise ConfigurationError(f"--images {folder}: holds no images, such as PNG, JPEG, WebP, AVIF or HEIC")
    limits = read_settings(MediaConfig, {})
    return {path.name: decode_image(path.read_bytes(), limits).image.convert("RGB") for path in files}
