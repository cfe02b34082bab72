"""/v1/embeddings through the real openai client and by hand, with a mock engine."""

from __future__ import annotations

import base64
import logging

import httpx
import numpy as np
import openai
import pytest

from tests.server.test_batches import content, finished, start
from tests.server.test_chat import about, data_url
from vlmserve.server.schema.base import logged_fields

TEXTS = ["A red circle", "Two blue squares", "A red circle"]


def post(live, path="/v1/embeddings", **fields):
    return httpx.post(f"{live.url}{path}", json=fields, timeout=30)


def test_texts_have_vectors_in_order(live):
    answer = live.openai.embeddings.create(model="tiny", input=TEXTS)
    assert [one.index for one in answer.data] == [0, 1, 2]
    first, other, same = (np.array(one.embedding) for one in answer.data)
    assert (first == same).all()
    assert abs(first @ other) < 0.9
    np.testing.assert_allclose(np.linalg.norm(first), 1, atol=1e-6)
    counts = [post(live, "/tokenize", prompt=text).json()["count"] for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(counts)


def test_encodings_and_kinds_of_inputs_agree(live):
    text = TEXTS[0]
    tokens = post(live, "/tokenize", prompt=text).json()["tokens"]
    asked = [
        live.openai.embeddings.create(model="tiny", input=text),  # the client asks for base64
        live.openai.embeddings.create(model="tiny", input=text, encoding_format="float"),
        live.openai.embeddings.create(model="tiny", input=tokens),
        live.openai.embeddings.create(model="tiny", input=[tokens]),
    ]
    vectors = np.array([answer.data[0].embedding for answer in asked], np.float32)
    assert (vectors == vectors[0]).all()
    raw = post(live, input=text, encoding_format="base64").json()["data"][0]["embedding"]
    assert (np.frombuffer(base64.b64decode(raw), "<f4") == vectors[0]).all()


def test_dimensions_are_cut_and_normalized(live):
    whole = np.array(live.openai.embeddings.create(model="tiny", input="a").data[0].embedding)
    kept = np.array(live.openai.embeddings.create(model="tiny", input="a", dimensions=8).data[0].embedding)
    np.testing.assert_allclose(kept, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    raw = np.array(post(live, input="a", dimensions=8, normalize=False).json()["data"][0]["embedding"])
    assert np.linalg.norm(raw) > 2


def test_conversations_with_images_have_vectors(live):
    shown = about(data_url("red"))
    answer = post(live, messages=shown).json()
    assert len(answer["data"]) == 1
    assert answer["usage"]["prompt_tokens_details"]["images"] == 1
    begun = [*shown, {"role": "assistant", "content": "b"}]
    assert post(live, messages=begun, continue_final_message=True).status_code == 200


def test_each_token_has_a_vector_on_request(live):
    answer = post(live, "/pooling", input=TEXTS[:2], task="token_embed", dimensions=6).json()
    vectors = [np.array(one["data"]) for one in answer["data"]]
    counts = [post(live, "/tokenize", prompt=text).json()["count"] for text in TEXTS[:2]]
    assert [one.shape for one in vectors] == [(count, 6) for count in counts]
    np.testing.assert_allclose(np.linalg.norm(vectors[0], axis=1), 1, atol=1e-6)
    raw = post(live, "/pooling", input=TEXTS[0], task="token_embed", dimensions=6, encoding_format="base64").json()
    packed = np.frombuffer(base64.b64decode(raw["data"][0]["data"]), "<f4")
    np.testing.assert_allclose(packed.reshape(-1, 6), vectors[0], atol=1e-6)
    whole = post(live, "/pooling", input=TEXTS[0]).json()
    assert whole["data"][0]["data"] == post(live, input=TEXTS[0]).json()["data"][0]["embedding"]


def test_many_vectors_are_written_as_few_are(live):
    one = post(live, input=TEXTS[0]).json()["data"][0]["embedding"]
    many = post(live, input=TEXTS[:1] * 200).json()["data"]
    assert all(found["embedding"] == one for found in many)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, None, "Give either input or messages"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, None, "Give either input or messages"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "must be a text"),
        ({"input": ["a", ""]}, "input[1]", "must not be empty"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": [10**6]}, "input", "not in the vocabulary"),
        ({"input": "a" * 100_000}, "input", "maximum context length"),
        ({"input": "a", "dimensions": 65}, "dimensions", "from 1 to 64"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "model": "other"}, "model", "other"),
    ],
)
def test_wrong_requests_are_explained(live, fields, param, message):
    answer = post(live, **fields)
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert (error["param"], message in error["message"]) == (param, True), error


def test_long_inputs_are_truncated_on_request(live):
    assert post(live, input="one two three", truncate_prompt_tokens=1).json()["usage"]["prompt_tokens"] == 1


def test_token_ids_are_warned_about_once(live, caplog):
    logged_fields.discard(("Input", "token ids"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert post(live, input=[5, 6]).status_code == 200
    assert sum("check_embedding_ctx_length=False" in record.message for record in caplog.records) == 1


def test_batches_embed(keeping):
    client: openai.OpenAI = keeping.openai
    body = {"model": "tiny", "input": "a"}
    rows = [{"custom_id": id, "method": "POST", "url": "/v1/embeddings", "body": body} for id in ("one", "two")]
    batch = finished(client, start(client, rows, endpoint="/v1/embeddings").id)
    vectors = [one["response"]["body"]["data"][0]["embedding"] for one in content(client, batch.output_file_id)]
    assert [len(vector) for vector in vectors] == [64, 64]
    assert batch.usage.total_tokens == batch.usage.input_tokens > 0
