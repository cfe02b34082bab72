"""/v1/score, /v1/rerank and /v2/rerank with a mock engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import LiveServer
from tests.server.test_chat import data_url
from vlmserve.errors import InvalidRequestError

DOCUMENTS = ["A red circle", "Two blue squares", "A green star"]
LONG = "red circle " * 100


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Iterator[LiveServer]:
    """A model whose tokenizer has yes and no."""
    folder: Path = make_mock_checkpoint(tmp_path_factory.mktemp("judge"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    with LiveServer(folder) as server:
        yield server


def post(server: LiveServer, path: str, **fields) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=fields, timeout=30)


def scores(server: LiveServer, **fields) -> list[float]:
    answer = post(server, "/v1/score", **fields).json()
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [one["score"] for one in answer["data"]]


def test_scores_come_in_order_of_the_documents(judge):
    found = scores(judge, text_1="red", text_2=DOCUMENTS)
    assert all(0 < score < 1 for score in found)
    assert found == scores(judge, queries=["red"] * 3, documents=DOCUMENTS)
    assert found[::-1] == scores(judge, data_1="red", data_2=DOCUMENTS[::-1])
    assert found[:1] == scores(judge, queries="red", documents=DOCUMENTS[0])
    assert found != scores(judge, queries="red", documents=DOCUMENTS, instruction="Find blue things")


def test_rankings_are_sorted_and_cut(judge):
    found = scores(judge, queries="red", documents=DOCUMENTS)
    answer = post(judge, "/v1/rerank", model="tiny", query="red", documents=[*DOCUMENTS[:2], {"text": DOCUMENTS[2]}])
    results = answer.json()["results"]
    assert [one["relevance_score"] for one in results] == sorted(found, reverse=True)
    assert [one["document"]["text"] for one in results] == [DOCUMENTS[one["index"]] for one in results]
    best = post(judge, "/v1/rerank", query="red", documents=DOCUMENTS, top_n=1, return_documents=False).json()
    assert best["results"] == [{"index": results[0]["index"], "relevance_score": results[0]["relevance_score"]}]
    assert best["usage"]["prompt_tokens"] == best["usage"]["total_tokens"] > 100


def test_coheres_form_has_no_documents(judge):
    answer = post(judge, "/v2/rerank", model="tiny", query="red", documents=DOCUMENTS, max_tokens_per_doc=1).json()
    assert answer["meta"]["api_version"]["version"] == "2"
    assert [set(one) for one in answer["results"]] == [{"index", "relevance_score"}] * 3
    whole = post(judge, "/v2/rerank", model="tiny", query="red", documents=DOCUMENTS).json()["results"]
    assert whole != answer["results"], "documents were shortened"


def test_long_documents_are_cut_before_length_checks(judge):
    whole, cut = [
        post(judge, "/v1/rerank", query="red", documents=[text], max_tokens_per_doc=3).json()
        for text in ("a red circle", "a red circle " * 9000)
    ]
    assert cut["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_judged_prompts_lose_the_ends_of_documents(judge):
    long, cut = "a red circle " * 9000, "a red circle a red circle a"
    whole = post(judge, "/v1/rerank", query="red", documents=[cut]).json()
    most = whole["usage"]["prompt_tokens"] - 2
    kept = post(judge, "/v1/rerank", query="red", documents=[long], truncate_prompt_tokens=most).json()
    assert kept["usage"]["prompt_tokens"] == most
    assert post(judge, "/v1/rerank", query="red", documents=[long], truncate_prompt_tokens=-1).status_code == 200
    none_left = post(judge, "/v1/score", queries="red", documents=[long], truncate_prompt_tokens=5)
    assert "leave none for documents" in none_left.json()["error"]["message"]


def test_one_bad_document_ends_the_work_on_all(judge, monkeypatch):
    cancelled = []

    async def prepare(messages, **settings):
        if "bad" in str(messages):
            raise InvalidRequestError("bad", param="messages")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(messages)
            raise

    monkeypatch.setattr(judge.service.preparation, "prepare", prepare)
    assert post(judge, "/v1/rerank", query="red", documents=["a", "b", "bad"]).status_code == 400
    assert len(cancelled) == 2


def test_images_are_ranked(judge):
    url = data_url("red")
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "a"}]
    answer = post(judge, "/v1/rerank", query="red", documents=["a", {"image": url}, {"content": content}]).json()
    assert len(answer["results"]) == 3
    assert answer["usage"]["prompt_tokens_details"]["images"] == 2
    bare = post(judge, "/v1/score", queries="red", documents={"image": url.partition(",")[2]})
    assert bare.status_code == 200, bare.text


@pytest.fixture(scope="module")
def retriever(tmp_path_factory) -> Iterator[LiveServer]:
    """A model whose tokens have vectors."""
    folder = make_mock_checkpoint(tmp_path_factory.mktemp("retriever"))
    with LiveServer(folder, engine={"pooling": "all"}, server={"max_vector_memory": 50_000}) as server:
        yield server


def test_vectors_of_tokens_are_compared(retriever):
    texts = ["red", *DOCUMENTS]
    vectors = [np.array(one.embedding) for one in retriever.openai.embeddings.create(model="tiny", input=texts).data]
    expected = [(vectors[0] @ one.T).max(1).sum() for one in vectors[1:]]
    np.testing.assert_allclose(scores(retriever, queries="red", documents=DOCUMENTS), expected, atol=1e-5)
    ranked = post(retriever, "/v2/rerank", query="red", documents=DOCUMENTS).json()["results"]
    shares = {one["index"]: one["relevance_score"] * len(vectors[0]) for one in ranked}
    np.testing.assert_allclose([shares[place] for place in range(3)], np.maximum(expected, 0), atol=1e-5)


@pytest.mark.parametrize(
    ("path", "param", "fields"),
    [("/v1/rerank", "documents", {"query": "red", "documents": [LONG]}), ("/v1/embeddings", "input", {"input": LONG})],
)
def test_vectors_of_a_request_are_limited(retriever, path, param, fields):
    error = post(retriever, path, **fields).json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert "50,000 are allowed (--max-vector-memory): send fewer inputs" in error["message"]


def test_few_dimensions_fit_into_the_limit(retriever):
    answer = post(retriever, "/v1/embeddings", input=LONG, dimensions=1)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"documents": ["a"]}, "query", "missing"),
        ({"query": "a", "documents": []}, "documents", "not be empty"),
        ({"query": "a", "documents": [{}]}, "documents[0]", "Give text, image or content"),
        ({"query": "", "documents": ["a"]}, "query", "Give text, image or content"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "must be at least 1"),
        ({"query": "a", "documents": ["a" * 100_000]}, "documents", "maximum context length"),
        ({"query": "a", "documents": [{"image": "data:image/png;base64,aaaa"}]}, "documents", "image"),
    ],
)
def test_wrong_requests_are_explained(judge, fields, param, message):
    error = post(judge, "/v1/rerank", **fields).json()["error"]
    assert (error["param"], message in error["message"]) == (param, True), error


def test_models_that_cannot_judge_say_so(live):
    answer = post(live, "/v1/score", queries="a", documents="b")
    assert answer.status_code == 400
    assert "cannot judge pairs" in answer.json()["error"]["message"]
