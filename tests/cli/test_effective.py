"""``vlmserve config``: what counts and where it comes from, and the page that lists all there is."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, SecretStr
from typer.testing import CliRunner

from tests.cli.probe import CLEAN, give
from vlmserve import cli
from vlmserve.cli import effective
from vlmserve.cli.fields import HIDDEN, SECTIONS, plain_type, plain_value, toml, type_name
from vlmserve.cli.sources import Origin, Origins
from vlmserve.settings.base import Settings
from vlmserve.settings.config import EngineConfig

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def show(*arguments: object, **environment: str) -> str:
    result = CliRunner(env=CLEAN | environment).invoke(cli.app, ["config", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_table_lists_each_setting_with_its_source(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[media]\nmax_images = 3\n")
    shown = show("--port", "81", "--config", path, VLMSERVE_SEED="7")
    lines = dict(re.findall(r"^ (\w+) +(.*?) *$", shown, re.MULTILINE))
    assert set(lines) >= {name for kind in SECTIONS.values() for name in kind.model_fields}
    assert re.split(" {2,}", lines["port"]) == ["81", "--port"]
    assert re.split(" {2,}", lines["seed"]) == ["7", "VLMSERVE_SEED"]
    assert re.split(" {2,}", lines["max_images"]) == ["3", f"{path} [media] max_images"]
    assert re.split(" {2,}", lines["dtype"]) == ['"auto"', "default"]
    assert [line for line in re.findall(r"^ (\[\w+\])", shown, re.MULTILINE)] == ["[server]", "[engine]", "[media]"]


def test_json_has_values_and_sources(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[media]\nmm_processor_kwargs = { fps = 2 }\n")
    shown = json.loads(
        show("--json", "./mine", "--swap-space", "1", "--config", path, VLMSERVE_SERVED_MODEL_NAME="a,b")
    )
    assert set(shown) == set(SECTIONS)
    assert shown["engine"]["kv_offload_memory"] == {"value": 2**30, "source": "flag", "from": "--swap-space"}
    assert shown["engine"]["model"] == {"value": "./mine", "source": "flag", "from": "MODEL"}
    assert shown["engine"]["kv_cache_memory"] == {"value": None, "source": "default", "from": "default"}
    named = {"value": ["a", "b"], "source": "environment", "from": "VLMSERVE_SERVED_MODEL_NAME"}
    assert shown["server"]["served_model_name"] == named
    overrides = shown["media"]["mm_processor_kwargs"]
    assert overrides == {"value": {"fps": 2.0}, "source": "file", "from": f"{path} [media] mm_processor_kwargs"}


def test_settings_of_one_worker_are_marked(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[server]\nhost = '0.0.0.0'\nport = 1\n[worker.eyes]\nport = 2\nseed = 3\n")
    shown = json.loads(show("--json", "--config", path, "--worker", "eyes"))
    assert shown["server"]["host"]["from"] == f"{path} [server] host"
    assert shown["server"]["port"] == {"value": 2, "source": "file", "from": f"{path} [worker.eyes] port"}
    assert shown["engine"]["seed"]["from"] == f"{path} [worker.eyes] seed"
    assert f"{path} [worker.eyes] port" in show("--config", path, VLMSERVE_WORKER="eyes")
    whole = tmp_path / "whole.toml"
    whole.write_text(show("--toml", "--config", path, "--worker", "eyes"))
    assert give("--config", whole).settings == give("--config", path, "--worker", "eyes").settings


@pytest.mark.parametrize(
    "line",
    [
        "",
        "./mine --kv-cache-memory 1000001 --kv-offload-memory 4GiB --memory-fraction 0.25 --no-enable-prefix-caching",
        '--served-model-name a,b --served-model-name c"\\d --mm-processor-kwargs {"max_pixels":900,"fps":1e-7}',
        "--chat-template {%\n\tfor\x7f\x01é😀#%} --max-model-len 9 --revision '''",
        "--quantize-layers *=int8 --quantize-group-size 64 --enable-debug --num-workers 3 --fetch-timeout 1e16",
    ],
)
def test_the_file_gives_the_same_settings_again(tmp_path, line):
    first = give(*line.split(" ") if line else [])
    assert first.exit_code == 0, first.stderr
    path = tmp_path / "again.toml"
    path.write_text(show("--toml", *line.split(" ") if line else []), encoding="utf-8")
    again = give("--config", path)
    assert (again.stderr, again.settings) == ("", first.settings)
    written = {name for table in tomllib.loads(path.read_text("utf-8")).values() for name in table}
    unset = set(re.findall(r"^# (\w+) is not set", path.read_text("utf-8"), re.MULTILINE))
    assert written | unset == {name for kind in SECTIONS.values() for name in kind.model_fields}


@given(st.recursive(st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
def test_values_are_written_as_toml_reads_them(value):
    assert tomllib.loads(f"value = {toml(value)}")["value"] == value


def test_the_ways_of_showing_exclude_each_other():
    result = CliRunner(env=CLEAN).invoke(cli.app, ["config", "--json", "--toml"])
    assert (result.exit_code, "give only one of --json, --toml and --reference" in result.stderr) == (2, True)


def test_wrong_settings_are_not_shown():
    result = CliRunner(env=CLEAN).invoke(cli.app, ["config", "--port", "99999"])
    assert (result.exit_code, result.stdout, "--port 99999" in result.stderr) == (2, "", True)


class Guarded(Settings):
    """Who may ask."""

    key: SecretStr | None = Field(None, description="Key.")
    keys: tuple[SecretStr, ...] = Field((), description="Keys.")
    word: str = Field("", description="Word.", repr=False)
    other: int = Field(3, description="Not secret.")


def test_secrets_are_shown_nowhere(capsys):
    guarded = Guarded(key="hush", keys=("hush",), word="hush")
    origins = Origins(key=Origin("environment", "VLMSERVE_KEY"))
    effective.show({"guard": guarded}, origins)
    table, as_json = capsys.readouterr().out, effective.as_json({"guard": guarded}, origins)
    as_toml = effective.as_toml({"guard": guarded}, origins)
    for shown in (table, as_json, as_toml):
        assert "hush" not in shown
        assert shown.count(HIDDEN) == 3
        assert "VLMSERVE_KEY" in shown
    assert tomllib.loads(as_toml) == {"guard": {"other": 3}}


def test_a_secret_that_is_not_set_is_none():
    shown = json.loads(effective.as_json({"guard": Guarded()}, Origins()))["guard"]
    assert [shown[name]["value"] for name in ("key", "keys", "word")] == [None, None, None]


def test_secrets_are_typed_as_text():
    types = {name: plain_type(field) for name, field in Guarded.model_fields.items()}
    assert types == {"key": str, "keys": list[str], "word": str, "other": int}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kv_cache_memory", "size"),
        ("block_size", "whole number, at least 1, at most 256"),
        ("memory_fraction", "number, over 0, at most 1"),
        ("quantize_layers", "list of texts"),
        ("load", "`eager` or `lazy`"),
        ("enable_prefix_caching", "yes or no"),
        ("chat_template", "text"),
    ],
)
def test_types_are_called_as_people_do(name, expected):
    assert type_name(EngineConfig.model_fields[name]) == expected


def test_config_has_the_flags_of_serve():
    def flags(command: str) -> set[str]:
        shown = CliRunner(env=CLEAN).invoke(cli.app, [command, "--help"]).stdout
        return set(re.findall(r"--[a-z][a-z0-9-]+", shown))

    assert flags("config") - flags("serve") == {"--json", "--toml", "--reference"}


def test_sizes_get_the_largest_unit():
    field = EngineConfig.model_fields["kv_offload_memory"]
    sizes = {0: "0", 1000: "1000", 2048: "2KiB", 3 * 2**20: "3MiB", 2**31: "2GiB", 2**30 + 1: str(2**30 + 1)}
    assert {size: plain_value(field, size, sizes_as_text=True) for size in sizes} == sizes


def test_the_page_in_the_documentation_is_fresh():
    """Write it again with: vlmserve config --reference > docs/settings.md"""
    assert show("--reference") == PAGE.read_text("utf-8")
    rows = re.findall(r"^\| `--([a-z0-9-]+)`", PAGE.read_text("utf-8"), re.MULTILINE)
    assert {name.replace("_", "-") for kind in SECTIONS.values() for name in kind.model_fields} <= set(rows)
