"""Settings: sizes as people write them, limits that hold, nothing silently ignored."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vlmserve.errors import ConfigurationError
from vlmserve.settings.base import parse_size, read_settings
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1048576),
        ("4GiB", 4 * 1024**3),
        ("512 MB", 512 * 10**6),
        ("1.5g", 1_500_000_000),
        (" 2kib ", 2048),
        ("3T", 3 * 10**12),
        ("7b", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert EngineConfig(kv_cache_memory=text).kv_cache_memory == size


@pytest.mark.parametrize("text", ["", "GiB", "4 gigs", "-1GiB", "4GiB please", "1e9", "nan"])
def test_what_is_no_size_is_an_error(text: str) -> None:
    with pytest.raises(ValidationError, match="kv_cache_memory"):
        EngineConfig(kv_cache_memory=text)


@given(st.integers(min_value=0, max_value=2**52))
def test_a_plain_number_of_bytes_is_itself(size: int) -> None:
    assert parse_size(str(size)) == size


@pytest.mark.parametrize("device", ["auto", "cpu", "mps", "cuda", "cuda:1"])
def test_known_devices_are_accepted(device: str) -> None:
    assert EngineConfig(device=device).device == device


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:0", ""])
def test_unknown_devices_are_errors(device: str) -> None:
    with pytest.raises(ValidationError, match="device"):
        EngineConfig(device=device)


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        (EngineConfig, "block_size", 0),
        (EngineConfig, "max_num_seqs", 0),
        (EngineConfig, "max_num_batched_tokens", 0),
        (EngineConfig, "memory_fraction", 0.0),
        (EngineConfig, "memory_fraction", 1.1),
        (EngineConfig, "dtype", "int8"),
        (EngineConfig, "seed", -1),
        (MediaConfig, "max_images", -1),
        (MediaConfig, "fetch_timeout", 0),
        (ServerConfig, "port", 65536),
        (ServerConfig, "max_body_bytes", "lots"),
    ],
)
def test_out_of_range_values_name_their_field(settings, field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        settings(**{field: value})


@pytest.mark.parametrize(
    ("settings", "field", "value", "message"),
    [
        (EngineConfig, "max_num_seqs", 0, "max_num_seqs 0: must be at least 1"),
        (EngineConfig, "dtype", "fp16", "dtype fp16: must be 'auto', 'float32', 'bfloat16' or 'float16'"),
        (ServerConfig, "api_key", 7, "api_key: the value is not valid; it is secret and not shown"),
        (MediaConfig, "mm_processor_kwargs", {"pixels": 9},
         "mm_processor_kwargs: there is no key pixels; use fps, max_pixels, max_tokens, min_pixels"),
    ],
)  # fmt: skip
def test_errors_say_what_is_allowed(settings, field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_settings(settings, {field: value})
    assert str(caught.value) == message


@pytest.mark.parametrize("settings", [EngineConfig, MediaConfig, ServerConfig])
def test_unknown_settings_are_errors(settings) -> None:
    with pytest.raises(ValidationError, match="max_num_seq"):
        settings(max_num_seq=3)


@pytest.mark.parametrize("settings", [EngineConfig, MediaConfig, ServerConfig])
def test_every_setting_has_a_default_and_a_description(settings) -> None:
    settings()
    assert not [name for name, field in settings.model_fields.items() if not field.description]


def test_settings_cannot_be_changed_afterwards() -> None:
    config = EngineConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3


def test_infinite_settings_survive_json():
    config = EngineConfig(encoder_step_share=math.inf)
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config
