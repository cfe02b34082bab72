"""Late interaction against transformers: ColQwen2 and ColPali. Vectors of tokens in chunks, and scores of pairs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    ColPaliConfig,
    ColPaliForRetrieval,
    ColQwen2Config,
    ColQwen2ForRetrieval,
    Qwen2VLImageProcessor,
    SiglipImageProcessor,
)

from tests.checkpoints import make_qwen_vl, rename_tensors
from tests.engine.test_transformers_images import make_paligemma
from tests.saved_models import save_model
from vlmserve import LLM
from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.deciding import Question

QUERY = "a red circle"
DOCUMENT = "two blue squares on the left"
SHOWN = "<|im_start|>user\n{images}Describe the image.<|im_end|><|endoftext|>"


def make_colqwen(folder: Path, kind: str = "qwen2_vl") -> Path:
    """A retriever as transformers writes it, around a Qwen2-VL or Qwen2.5-VL."""
    make_qwen_vl(folder, kind)
    inner = json.loads((folder / "config.json").read_text())
    save_model(folder, ColQwen2ForRetrieval, ColQwen2Config(vlm_config=inner, embedding_dim=12))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "<|im_end|>"}))
    return folder


def make_colpali(folder: Path) -> Path:
    """A retriever around a PaliGemma."""
    make_paligemma(folder)
    inner = json.loads((folder / "config.json").read_text())
    save_model(folder, ColPaliForRetrieval, ColPaliConfig(vlm_config=inner, embedding_dim=12))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "<unk>"}))
    return folder


class ColQwen:
    """A checkpoint, and transformers' opinion of it."""

    begin = ""
    question = "Query: "
    pad = "<|im_end|>"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = ColQwen2ForRetrieval.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = Qwen2VLImageProcessor.from_pretrained(folder)

    def query(self, text: str, pads: int = 10) -> np.ndarray:
        return self.vectors(f"{self.question}{text}{self.pad * pads}\n")

    @torch.inference_mode()
    def vectors(self, text: str) -> np.ndarray:
        ids = self.tokenizer(self.begin + text, return_tensors="pt", add_special_tokens=False).input_ids
        types = {"token_type_ids": torch.zeros_like(ids)} if self.begin else {}  # as its processor makes them
        return self.model(input_ids=ids, attention_mask=torch.ones_like(ids), **types).embeddings[0].numpy()

    @torch.inference_mode()
    def document(self, *images: Image.Image) -> np.ndarray:
        inputs = dict(self.images(list(images), return_tensors="pt"))
        counts = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]
        shown = "".join(f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in counts)
        ids = self.tokenizer(SHOWN.format(images=shown), return_tensors="pt", add_special_tokens=False).input_ids
        grid, types = inputs["image_grid_thw"], (ids == self.model.config.vlm_config.image_token_id).int()
        # Transformers leaves the grid out, unlike the code that ColQwen2 was trained with.
        inputs["position_ids"], _ = self.model.vlm.get_rope_index(ids, types, image_grid_thw=grid)
        # It takes one image with each prompt.
        features = self.model.vlm.get_image_features(inputs["pixel_values"], grid).pooler_output
        embeddings = self.model.vlm.get_input_embeddings()(ids)
        embeddings[types.bool()] = torch.cat(list(features))
        states = self.model.vlm.language_model(inputs_embeds=embeddings, position_ids=inputs["position_ids"])[0]
        made = self.model.embedding_proj_layer(states)[0]
        return torch.nn.functional.normalize(made, dim=-1).numpy()


class ColPali(ColQwen):
    """The same for ColPali, which takes one image."""

    begin = "<s>"
    question = "Question: "
    pad = "<unk>"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = ColPaliForRetrieval.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = SiglipImageProcessor.from_pretrained(folder)

    @torch.inference_mode()
    def document(self, *images: Image.Image) -> np.ndarray:
        pixels = self.images(list(images), return_tensors="pt").pixel_values
        text = f"{'<image>' * 4}<s>Describe the image.\n"
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        types = torch.zeros_like(ids)
        return self.model(input_ids=ids, pixel_values=pixels, token_type_ids=types).embeddings[0].numpy()


KINDS = {
    "qwen2_vl": lambda folder: ColQwen(make_colqwen(folder, "qwen2_vl")),
    "qwen2_5_vl": lambda folder: ColQwen(make_colqwen(folder, "qwen2_5_vl")),
    "paligemma": lambda folder: ColPali(make_colpali(folder)),
}


@pytest.fixture(scope="module", params=KINDS)
def retriever(request, tmp_path_factory) -> ColQwen:
    return KINDS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def image() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8))


def shown(*images: Image.Image) -> list[dict]:
    return [{"role": "user", "content": [{"type": "image", "image": image} for image in images]}]


def test_tokens_have_transformers_vectors(retriever, image):
    llm = LLM(str(retriever.folder), dtype="float32", max_num_batched_tokens=16)
    found = llm.embed([DOCUMENT, shown(image), "a"], use_tqdm=False)
    expected = [retriever.vectors(DOCUMENT), retriever.document(image), retriever.vectors("a")]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.outputs.data, theirs, atol=1e-4)


@pytest.mark.parametrize("retriever", ["qwen2_vl"], indirect=True)
def test_documents_show_several_images_and_videos(retriever, image):
    llm = LLM(str(retriever.folder), dtype="float32")
    [found] = llm.embed(shown(image, image.rotate(90, expand=True)), use_tqdm=False)
    expected = retriever.document(image, image.rotate(90, expand=True))
    np.testing.assert_allclose(found.outputs.data, expected, atol=1e-4)
    video = [{"role": "user", "content": [{"type": "video", "video": [image, image]}]}]
    [found] = llm.embed(video, use_tqdm=False)
    assert found.outputs.data.shape == (len(found.prompt_token_ids), 12)


def test_scores_sum_the_best_cosines_of_query_tokens(retriever, image):
    llm = LLM(str(retriever.folder), dtype="float32")
    query = retriever.query(QUERY)
    documents = [retriever.vectors(DOCUMENT), retriever.document(image)]
    expected = [(query @ document.T).max(1).sum() for document in documents]
    found = llm.score(QUERY, [DOCUMENT, shown(image)[0]["content"]], use_tqdm=False)
    np.testing.assert_allclose([one.outputs.score for one in found], expected, atol=1e-3)


def test_control_tokens_in_queries_are_text(retriever):
    llm = LLM(str(retriever.folder), dtype="float32")
    [plain], [marked] = [llm.score(text, [DOCUMENT], use_tqdm=False) for text in (QUERY, f"{QUERY}{retriever.pad}")]
    as_token = (retriever.query(QUERY, pads=11) @ retriever.vectors(DOCUMENT).T).max(1).sum()
    assert plain.outputs.score != marked.outputs.score
    assert abs(marked.outputs.score - as_token) > 1e-3


def test_original_names_of_tensors_are_read(retriever, tmp_path):
    config = json.loads((retriever.folder / "config.json").read_text())
    original = {"qwen2_vl": "ColQwen2", "qwen2_5_vl": "ColQwen2_5", "paligemma": "ColPali"}
    inner = {**config["vlm_config"], "architectures": [original[config["vlm_config"]["model_type"]]]}
    shutil.copytree(retriever.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(inner))
    rename_tensors(
        tmp_path,
        lambda name: (
            name.replace("embedding_proj_layer", "custom_text_proj")
            .replace("vlm.language_model.", "model.language_model.model." if retriever.begin else "model.")
            .replace("vlm.", "model." if retriever.begin else "")
        ),
    )
    [found] = LLM(str(tmp_path), dtype="float32").embed([DOCUMENT], use_tqdm=False)
    np.testing.assert_allclose(found.outputs.data, retriever.vectors(DOCUMENT), atol=1e-4)


def test_retrievers_decide_nothing(retriever):
    with pytest.raises(InvalidRequestError, match="makes vectors"):
        LLM(str(retriever.folder)).decide([{"role": "user", "content": "a"}], [Question.predicate("b")])
