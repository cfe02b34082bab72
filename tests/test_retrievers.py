"""Late interaction against transformers' ColQwen2: vectors of tokens, alone and in chunks, and the scores of pairs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, ColQwen2Config, ColQwen2ForRetrieval, Qwen2VLImageProcessor

from tests.checkpoints import make_qwen_vl, rename_tensors
from tests.saved_models import save_model
from vlmserve import LLM

QUERY = "a red circle"
DOCUMENT = "two blue squares on the left"
PREFIX = "<|im_start|>user\n<|vision_start|>{image}<|vision_end|>Describe the image.<|im_end|><|endoftext|>"


def make_colqwen(folder: Path, kind: str = "qwen2_vl") -> Path:
    """A retriever as transformers writes it, around a Qwen2-VL or Qwen2.5-VL."""
    make_qwen_vl(folder, kind)
    inner = json.loads((folder / "config.json").read_text())
    save_model(folder, ColQwen2ForRetrieval, ColQwen2Config(vlm_config=inner, embedding_dim=12))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "<|im_end|>"}))
    return folder


class Retriever:
    """A checkpoint, and transformers' opinion of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = ColQwen2ForRetrieval.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = Qwen2VLImageProcessor.from_pretrained(folder)

    @torch.inference_mode()
    def vectors(self, text: str, image: Image.Image | None = None) -> np.ndarray:
        inputs = {} if image is None else dict(self.images(image, return_tensors="pt"))
        if image is not None:
            text = text.format(image="<|image_pad|>" * (int(inputs["image_grid_thw"].prod()) // 4))
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        if image is not None:
            grid, types = inputs["image_grid_thw"], (ids == self.model.config.vlm_config.image_token_id).int()
            # Transformers leaves the grid out, unlike the code that ColQwen2 was trained with.
            inputs["position_ids"], _ = self.model.vlm.get_rope_index(ids, types, image_grid_thw=grid)
            inputs["pixel_values"] = inputs["pixel_values"][None]
        return self.model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).embeddings[0].numpy()


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def retriever(request, tmp_path_factory) -> Retriever:
    return Retriever(make_colqwen(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def image() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8))


def shown(image: Image.Image) -> list[dict]:
    return [{"role": "user", "content": [{"type": "image", "image": image}]}]


def test_tokens_have_transformers_vectors(retriever, image):
    llm = LLM(str(retriever.folder), dtype="float32", max_num_batched_tokens=16)
    found = llm.embed([DOCUMENT, shown(image), "a"], use_tqdm=False)
    expected = [retriever.vectors(DOCUMENT), retriever.vectors(PREFIX, image), retriever.vectors("a")]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.outputs.data, theirs, atol=1e-4)


def test_scores_sum_the_best_cosines_of_query_tokens(retriever, image):
    llm = LLM(str(retriever.folder), dtype="float32")
    query = retriever.vectors(f"Query: {QUERY}{'<|im_end|>' * 10}\n")
    documents = [retriever.vectors(DOCUMENT), retriever.vectors(PREFIX, image)]
    expected = [(query @ document.T).max(1).sum() for document in documents]
    found = llm.score(QUERY, [DOCUMENT, shown(image)[0]["content"]], use_tqdm=False)
    np.testing.assert_allclose([one.outputs.score for one in found], expected, atol=1e-3)


def test_control_tokens_in_queries_are_text(retriever):
    llm = LLM(str(retriever.folder), dtype="float32")
    [plain], [marked] = [llm.score(text, [DOCUMENT], use_tqdm=False) for text in (QUERY, f"{QUERY}<|im_end|>")]
    marked_tokens = retriever.vectors(f"Query: {QUERY}{'<|im_end|>' * 11}\n")
    as_token = (marked_tokens @ retriever.vectors(DOCUMENT).T).max(1).sum()
    assert plain.outputs.score != marked.outputs.score
    assert abs(marked.outputs.score - as_token) > 1e-3


def test_original_names_of_tensors_are_read(retriever, tmp_path):
    make_colqwen(tmp_path, retriever.model.config.vlm_config.model_type)
    config = json.loads((tmp_path / "config.json").read_text())
    qwen2 = config["vlm_config"]["model_type"] == "qwen2_vl"
    inner = {**config["vlm_config"], "architectures": ["ColQwen2" if qwen2 else "ColQwen2_5"]}
    (tmp_path / "config.json").write_text(json.dumps(inner))
    rename_tensors(
        tmp_path,
        lambda name: (
            name.replace("embedding_proj_layer", "custom_text_proj")
            .replace("vlm.language_model.", "model.")
            .replace("vlm.visual.", "visual.")
        ),
    )
    [found] = LLM(str(tmp_path), dtype="float32").embed([DOCUMENT], use_tqdm=False)
    np.testing.assert_allclose(found.outputs.data, retriever.vectors(DOCUMENT), atol=1e-4)
