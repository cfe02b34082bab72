"""Prompts of models that take one image and one text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import BertTokenizerFast
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from tests.blip import BEGIN, CLASSES, FEATURES, make_blip
from tests.media.images_for_tests import noise
from tests.moondream import SETTINGS, TOKENS, make_moondream
from tests.normalized import normalized
from vlmserve.errors import InvalidRequestError, ModelLoadError, TooManyImagesError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.media.crops import CropProcessor
from vlmserve.media.images import DecodedImage
from vlmserve.prompt.one_image import one_image_prompts
from vlmserve.settings.config import MediaConfig

IMAGE = noise(40, 30)
TEXTS = ["What is in the image?", "hello world", "a [SEP] b [CLS][MASK]", "[SEP]", "naïve ##café"]


@pytest.fixture(scope="module", params=CLASSES)
def blip(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, make_blip(tmp_path_factory.mktemp("blip"), request.param)


@pytest.fixture(scope="module")
def preparer(blip: tuple[str, Path]) -> RequestPreparer:
    return RequestPreparer(blip[1], MediaConfig())


def user(*parts: Any) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_pixels_are_those_of_transformers(blip: tuple[str, Path], preparer: RequestPreparer, text: str) -> None:
    kind, folder = blip
    prompt = preparer.chat(user(IMAGE, text), allow_local=True)
    # What a user writes is never a control token; transformers' tokenizer is told so with this option.
    tokenizer = BertTokenizerFast.from_pretrained(folder, split_special_tokens=True)
    cls, *ids, sep = tokenizer(text)["input_ids"]
    assert prompt.cross is not None
    if kind == "caption":
        assert (prompt.token_ids, prompt.cross.token_ids) == ([BEGIN, *ids], [])
    else:
        assert (prompt.token_ids, prompt.cross.token_ids) == ([BEGIN], [cls, *ids, sep])
    size = {"height": 24, "width": 24}
    pixels = BlipImageProcessorPil(size=size)(images=IMAGE, return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(normalized(prompt.cross.image), pixels, rtol=0, atol=1e-6)
    assert (prompt.cross.image.num_tokens, prompt.num_images) == (FEATURES, 1)
    assert preparer.text(text, [IMAGE], allow_local=True).token_ids == prompt.token_ids


def test_without_a_text_an_image_is_described(blip: tuple[str, Path], preparer: RequestPreparer) -> None:
    kind, _ = blip
    for messages in (user(IMAGE), user(IMAGE, ""), user("  ", IMAGE)):
        if kind == "caption":
            assert preparer.chat(messages, allow_local=True).token_ids == [BEGIN]
        else:
            with pytest.raises(InvalidRequestError, match="ask one"):
                preparer.chat(messages, allow_local=True)


def test_other_conversations_are_refused(preparer: RequestPreparer) -> None:
    assert preparer.media.supports_images
    answer = {"role": "assistant", "content": "A dog."}
    for messages in (
        [{"role": "system", "content": "Be brief."}, *user(IMAGE, "What?")],
        [*user(IMAGE, "What?"), answer, *user("And?")],
        [answer],
    ):
        with pytest.raises(InvalidRequestError, match="does not support conversations"):
            preparer.chat(messages, allow_local=True)
    with pytest.raises(InvalidRequestError, match="one image with each request, not 0"):
        preparer.chat(user("What?"), allow_local=True)
    with pytest.raises(TooManyImagesError, match="not 2"):
        preparer.chat(user(IMAGE, IMAGE, "What?"), allow_local=True)
    with pytest.raises(InvalidRequestError, match="not 0"):
        preparer.text("What?")


def test_tenants_images_have_keys_of_their_own(preparer: RequestPreparer) -> None:
    keys = set()
    for salt in ("", "a", "b"):
        prompt = preparer.chat(user(IMAGE, "What?"), allow_local=True, cache_salt=salt)
        assert prompt.cross is not None
        keys.add(prompt.cross.image.key)
    assert len(keys) == 3


@pytest.fixture(scope="module")
def moondream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moondream(tmp_path_factory.mktemp("moondream"))[0]


@pytest.mark.parametrize("text", ["What is in the image?", " two\n\nlines ", "<|endoftext|> and <|endof", "naïve 😀"])
def test_moondream_image_precedes_its_question(moondream: Path, text: str) -> None:
    prompt = RequestPreparer(moondream, MediaConfig()).chat(user(text, IMAGE), allow_local=True)
    plain = Tokenizer.from_file(str(moondream / "tokenizer.json"))
    plain.encode_special_tokens = True  # what a user writes is never a control token
    pieces = ["\n\nQuestion:", f" {text.strip()}", "\n\nAnswer:"]
    asked = [token for piece in pieces for token in plain.encode(piece, add_special_tokens=False).ids]
    assert prompt.token_ids == [0] * (1 + TOKENS) + asked
    [span] = prompt.images
    assert (span.start, span.end) == (1, 1 + TOKENS)
    assert prompt.cross is None
    np.testing.assert_array_equal(
        span.image.pixels, CropProcessor({"config": SETTINGS}).process(DecodedImage.whole(IMAGE))
    )


def test_moondream_describes_an_image_without_a_question(moondream: Path) -> None:
    preparer = RequestPreparer(moondream, MediaConfig())
    plain = Tokenizer.from_file(str(moondream / "tokenizer.json"))
    asked = plain.encode("\n\nCaption:", add_special_tokens=False).ids
    for messages in (user(IMAGE), user(IMAGE, "")):
        assert preparer.chat(messages, allow_local=True).token_ids[1 + TOKENS :] == asked
    with pytest.raises(InvalidRequestError, match="not 0"):
        preparer.chat(user("What?"), allow_local=True)


def test_the_first_token_is_the_configs(tmp_path: Path) -> None:
    def first(config: dict[str, Any]) -> int:
        prompts = one_image_prompts({"model_type": "blip", **config})
        assert prompts is not None
        return prompts.begin

    assert first({}) == 30522
    assert first({"text_config": {"bos_token_id": 7}}) == 7
    with pytest.raises(ModelLoadError, match="bos_token_id"):
        first({"text_config": {"bos_token_id": [7]}})
    assert first({"model_type": "moondream1"}) == 50256
    assert first({"model_type": "moondream1", "config": {"tokenizer": {"bos_id": 7}}}) == 7
    assert one_image_prompts({"model_type": "llava"}) is None
