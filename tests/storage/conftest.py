from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.clock import Clock
from vlmserve.settings.config import ServerConfig
from vlmserve.storage.items import PackedItem
from vlmserve.storage.store import Store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path) -> str:
    """An empty database."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres").new_database())
    return f"sqlite:///{tmp_path / 'history.db'}"


@pytest.fixture
def open_store(url, clock) -> Iterator[Callable[..., Store]]:
    """Opens stores on that database, with settings, and closes them all."""
    stores = []

    def open_one(**settings: Any) -> Store:
        stores.append(Store(url, ServerConfig(**{"storage_sweep_interval": 86400, **settings}), clock))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def store(open_store) -> Store:
    return open_store()


_numbers = itertools.count()


def item(text: str, *images: str) -> PackedItem:
    """An item with a text and with images at these URLs."""
    parts = [{"type": "input_image", "image_url": image} for image in images]
    return PackedItem.of({"id": f"msg_{next(_numbers)}", "content": [*parts, {"type": "input_text", "text": text}]})


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [item["content"][-1]["text"] for item in items]
