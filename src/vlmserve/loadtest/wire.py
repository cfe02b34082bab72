"""Requests as bytes, joined from parts made before the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from vlmserve.loadtest.client import Client
from vlmserve.loadtest.settings import TargetConfig
from vlmserve.loadtest.workload import Fragments


class RequestFormat:
    """exact, usage: whether the server knows ignore_eos and stream_options."""

    def __init__(self, target: TargetConfig, model: str, *, exact: bool, usage: bool) -> None:
        self.path = target.endpoint
        self.streams = target.stream
        self.is_chat = "chat" in target.endpoint
        self.exact, self.usage = exact, usage
        fields: dict[str, Any] = {"stream": target.stream}
        if target.temperature is not None:
            fields["temperature"] = target.temperature
        if target.stream and usage:
            fields["stream_options"] = {"include_usage": True}
        if exact:
            fields["ignore_eos"] = True
        key, close = (b',"messages":[', b"],") if self.is_chat else (b',"prompt":', b",")
        self._head = b'{"model":' + msgspec.json.encode(model) + key
        self._tail = close + msgspec.json.encode({**fields, **target.extra_body})[1:-1] + b',"max_tokens":%d}'

    def request(self, client: Client, messages: Sequence[Fragments], max_tokens: int) -> list[bytes]:
        """messages: a conversation or one prompt, as JSON."""
        body = [self._head]
        for place, message in enumerate(messages):
            body += [b",", *message] if place else message
        body.append(self._tail % max_tokens)
        return client.request("POST", self.path, body)


def answer_message(text: str) -> Fragments:
    """An answer as JSON, for its conversation's next request."""
    return (msgspec.json.encode({"role": "assistant", "content": text}),)
