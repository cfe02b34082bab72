"""A checkpoint for mock engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mock_checkpoint import make_mock_checkpoint


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mock_checkpoint(tmp_path_factory.mktemp("checkpoint"), context=4096)
