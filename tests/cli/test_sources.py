"""Settings from flags, variables and files: which of them counts, and what is refused."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import typer
from pydantic import Field, SecretStr
from typer.testing import CliRunner

from tests.cli.probe import CLEAN, give
from vlmserve import cli
from vlmserve.cli.fields import SECTIONS
from vlmserve.cli.options import command
from vlmserve.cli.sources import MAX_FILE_BYTES, OTHER_VARIABLES
from vlmserve.errors import ConfigurationError
from vlmserve.settings.base import Settings, read_settings
from vlmserve.settings.config import EngineConfig, MediaConfig, ProcessorOverrides, ServerConfig


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "vlmserve.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# Precedence


@pytest.mark.parametrize("present", [set(c) for n in range(4) for c in itertools.combinations(["f", "e", "t"], n)])
def test_flags_beat_variables_beat_file_beats_default(write, present):
    path = write("[server]\nport = 3\n" if "t" in present else "")
    flags = ["--port", "1"] if "f" in present else []
    variables = {"VLMSERVE_PORT": "2"} if "e" in present else {}
    given = give("--config", path, *flags, **variables)
    expected = [(1, "--port"), (2, "VLMSERVE_PORT"), (3, f"{path} [server] port"), (8000, None)]
    value, origin = next(
        pair for pair, source in zip(expected, "fet-", strict=True) if source in present or pair[1] is None
    )
    assert (given.port, given.origins.get("port")) == (value, origin)


def test_flag_with_the_default_value_wins_too():
    assert give("--port", "8000", VLMSERVE_PORT="9").port == 8000
    assert give("--no-exact-pixels", VLMSERVE_EXACT_PIXELS="true").exact_pixels is False


@pytest.mark.parametrize("source", ["argument", "variable", "file"])
def test_the_model_comes_from_everywhere_too(write, source):
    path = write('[engine]\nmodel = "./c"\n')
    given = give(
        *(["./a"] if source == "argument" else []),
        *(["--config", path] if source != "variable" else []),
        VLMSERVE_MODEL="./b" if source != "file" else None,
    )
    assert given.model == {"argument": "./a", "variable": "./b", "file": "./c"}[source]


def test_sources_add_up(write):
    path = write("[engine]\nseed = 1\nblock_size = 8\n[media]\nmax_images = 2\n")
    given = give("--config", path, "--seed", "3", VLMSERVE_MAX_NUM_SEQS="4")
    assert (given.seed, given.block_size, given.max_images, given.max_num_seqs) == (3, 8, 2, 4)


def test_variable_names_the_file_and_flag_overrides(write, tmp_path):
    path = write("[server]\nport = 3\n")
    other = tmp_path / "other.toml"
    other.write_text("[server]\nport = 4\n")
    assert give(VLMSERVE_CONFIG=str(path)).port == 3
    assert give("--config", other, VLMSERVE_CONFIG=str(path)).port == 4


def test_no_file_is_read_that_nobody_named(write, monkeypatch):
    monkeypatch.chdir(write("[server]\nport = 3\n").parent)
    assert give().port == 8000


# Workers

WORKERS = """
[server]
host = "0.0.0.0"
port = 8000

[engine]
seed = 1
dtype = "float32"

[worker.eyes]
model = "./eyes"
port = 8001
max_images = 3

[worker.words]
model = "./words"
seed = 2
port = "wrong"
"""


def test_worker_section_overrides_common_settings(write):
    path = write(WORKERS)
    given = give("--config", path, "--worker", "eyes")
    assert (given.model, given.port, given.max_images) == ("./eyes", 8001, 3)
    assert (given.host, given.seed, given.dtype) == ("0.0.0.0", 1, "float32")
    assert given.origins["port"] == f"{path} [worker.eyes] port"
    assert given.origins["host"] == f"{path} [server] host"
    none = give("--config", path)
    assert (none.model, none.port, none.max_images) == ("pixie", 8000, 16)


@pytest.mark.parametrize("present", [set(c) for n in range(4) for c in itertools.combinations("few", n)])
def test_flags_beat_variables_beat_worker_beats_common(write, present):
    path = write("[server]\nport = 4\n[worker.a]\n" + ("port = 3\n" if "w" in present else ""))
    flags = ["--port", "1"] if "f" in present else []
    variables = {"VLMSERVE_PORT": "2"} if "e" in present else {}
    given = give("--config", path, "--worker", "a", *flags, **variables)
    expected = {"f": 1, "e": 2, "w": 3}
    assert given.port == min((expected[source] for source in present), default=4)


def test_variable_names_the_worker_and_flag_overrides(write):
    path = str(write("[worker.a]\nport = 1\n[worker.b]\nport = 2\n[worker.'c d']\nport = 3\n"))
    assert give(VLMSERVE_CONFIG=path, VLMSERVE_WORKER="a").port == 1
    assert give("--worker", "b", VLMSERVE_CONFIG=path, VLMSERVE_WORKER="a").port == 2
    assert give("--config", path, VLMSERVE_WORKER="").port == 8000
    quoted = give("--config", path, "--worker=c d")
    assert (quoted.port, quoted.origins["port"]) == (3, f'{path} [worker."c d"] port')


def test_undescribed_worker_is_an_error(write):
    path = write(WORKERS)
    refused(give("--config", path, "--worker", "eye"), "--worker eye", "only eyes, words; did you mean eyes?")
    refused(give("--config", path, "--worker", ""), '[worker.""]', "only eyes, words")
    refused(give("--config", path, VLMSERVE_WORKER="xyz"), f"VLMSERVE_WORKER xyz: {path} has no [worker.xyz]")
    refused(give("--config", write("[server]\nport = 1\n"), "--worker", "a"), "describes no workers", "[worker.NAME]")
    refused(give("--worker", "a"), "--worker a", "--config")
    refused(give(VLMSERVE_WORKER="a"), "VLMSERVE_WORKER a", "--config")


def test_a_wrong_value_counts_where_its_worker_does(write):
    path = write(WORKERS)
    assert give("--config", path, "--worker", "eyes").exit_code == 0
    refused(give("--config", path, "--worker", "words"), f"{path} [worker.words] port wrong", "whole number")
    assert give("--config", path, "--worker", "words", "--port", "5").seed == 2


# Values


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("kv_cache_memory", "2GiB", 2 * 1024**3),
        ("max_body_bytes", "1.5 MB", 1_500_000),
        ("enable_debug", "true", True),
        ("enable_debug", "1", True),
        ("enable_prefix_caching", "no", False),
        ("served_model_name", "a", ("a",)),
        ("served_model_name", "a, b", ("a", "b")),
        ("served_model_name", '["a,b", "c"]', ("a,b", "c")),
        ("quantize_group_size", "64", 64),
        ("mm_processor_kwargs", '{"max_pixels": 900}', ProcessorOverrides(max_pixels=900)),
        ("fetch_timeout", "2.5", 2.5),
        ("max_model_len", "128", 128),
        ("host", "", "127.0.0.1"),
    ],
)
def test_variables_are_text(name, text, value):
    assert getattr(give(**{f"VLMSERVE_{name.upper()}": text}), name) == value


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ('kv_cache_memory = "2GiB"', "kv_cache_memory", 2 * 1024**3),
        ("kv_cache_memory = 4096", "kv_cache_memory", 4096),
        ("enable_prefix_caching = false", "enable_prefix_caching", False),
        ('quantize_layers = ["a=int8", "b=none"]', "quantize_layers", ("a=int8", "b=none")),
        ('quantize_layers = "a=int8"', "quantize_layers", ("a=int8",)),
        ("memory_fraction = 1", "memory_fraction", 1.0),
    ],
)
def test_files_have_types(write, line, name, value):
    assert getattr(give("--config", write(f"[engine]\n{line}\n")), name) == value


def test_file_tables_equal_json_on_the_command_line(write):
    path = write("[media.mm_processor_kwargs]\nmax_pixels = 900\nfps = 2\n")
    assert give("--config", path).mm_processor_kwargs == ProcessorOverrides(max_pixels=900, fps=2)


def test_switches_have_two_flags():
    assert give("--enable-debug", "--no-enable-prefix-caching").enable_prefix_caching is False
    assert give("--enable-debug").enable_debug is True
    assert give("--no-enable-debug", VLMSERVE_ENABLE_DEBUG="1").enable_debug is False


def test_file_with_a_utf8_mark_is_read(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbf[server]\r\nport = 5\r\n")
    assert give("--config", path).port == 5


# Errors


def refused(given, *words: str) -> None:
    assert given.exit_code == 2
    assert given.stderr.count("\n") == 1, given.stderr
    assert [word for word in words if word not in given.stderr] == []


def test_wrong_values_name_their_source(write):
    path = write("[server]\nport = 99999\n")
    refused(give("--config", path), f"{path} [server] port 99999", "65535")
    refused(give(VLMSERVE_PORT="x"), "VLMSERVE_PORT x", "whole number")
    refused(give("--port", "99999"), "--port 99999")
    refused(give("--gpu-memory-utilization", "3"), "--gpu-memory-utilization 3")
    refused(
        give("--port", "99999", VLMSERVE_HOST="x", VLMSERVE_SHUTDOWN_GRACE="-1"), "--port", "VLMSERVE_SHUTDOWN_GRACE"
    )


@pytest.mark.parametrize("line", ["port = true", "host = 3", "host = []", "stats_interval = nan", "port = 1979-05-27"])
def test_wrong_types_in_a_file_are_errors(write, line):
    name = line.partition(" ")[0]
    refused(give("--config", write(f"[server]\n{line}\n")), f"[server] {name}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nprot = 1", ["[server] prot", "port in [server]"]),
        ("[server]\nmax_model_len = 1", ["[server] max_model_len", "[engine]"]),
        ("[engine]\ngpu_memory_utilization = 0.5", ["gpu_memory_utilization", "called memory_fraction in [engine]"]),
        ("[engine]\nmax-model-len = 1", ["max-model-len", "max_model_len in [engine]"]),
        ("[engin]\nseed = 1", ["[engin]", "[engine]?"]),
        ("[elsewhere]\nseed = 1", ["[elsewhere]", "[server], [engine], [media], [worker.NAME]"]),
        ("seed = 1", ["seed", "below [engine]"]),
        ("server = 1", ["write [server]"]),
        ("[server]\nport = \nseed = 1", ["not TOML", "line 2"]),
        ("[engine]\npipeline_parallel_size = 2", ["pipeline_parallel_size", "every layer"]),
        ("[server]\nxyzzy = 1", ["xyzzy", "vlmserve config"]),
        ("[worker.a]\nprot = 1", ["[worker.a] prot: unknown setting; did you mean port?"]),
        ("[worker.a]\ngpu_memory_utilization = 0.5", ["[worker.a] gpu_memory", "it is called memory_fraction here"]),
        ("[worker.a.engine]\nseed = 1", ["[worker.a] engine", "settings of [engine] right below [worker.a]"]),
        ("[worker.'a b']\nseeed = 1", ['[worker."a b"] seeed', "seed?"]),
        ("[worker]\nseed = 1", ["[worker] seed belongs to no worker; write it below [worker.NAME]"]),
        ("worker = 1", ["worker is a section; write [worker.NAME]"]),
        ("[[worker]]\nport = 1", ["write [worker.NAME]"]),
        ("[workers.a]\nport = 1", ["[workers]", "did you mean [worker.NAME]?"]),
        ("[worker.a]\nport = 1\n[worker.b]\nprot = 1\n[server]\nhots = 1", ["[worker.b] prot", "[server] hots"]),
    ],
)
def test_unknown_keys_suggest_what_was_meant(write, text, words):
    refused(give("--config", write(text)), "vlmserve.toml", *words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("VLMSERVE_MAX_MODEL_LENGTH", ["VLMSERVE_MAX_MODEL_LEN?"]),
        ("VLMSERVE_GPU_MEMORY_UTILIZATION", ["VLMSERVE_MEMORY_FRACTION"]),
        ("VLMSERVE_CONFIGS", ["VLMSERVE_CONFIG?"]),
        ("VLMSERVE_WORKERS", ["VLMSERVE_WORKER?"]),
        ("VLMSERVE_LIMIT_MM_PER_PROMPT", ["VLMSERVE_MAX_IMAGES and VLMSERVE_MAX_VIDEOS"]),
        ("VLMSERVE_TRUST_REMOTE_CODE", ["Code from a checkpoint is never run"]),
        ("VLMSERVE_CUDA_GRAPH_SIZES", ["The sizes are fixed"]),
        ("VLMSERVE_XYZZY", ["vlmserve config"]),
    ],
)
def test_unknown_variables_suggest_what_was_meant(name, words):
    refused(give(**{name: "1"}), name, *words)


def test_variables_of_the_build_are_known():
    """Who exports one to build from source starts the server in the same shell."""
    text = (Path(__file__).parents[2] / "setup.py").read_text("utf-8")
    read = set(re.findall(r'environ\S*"(VLMSERVE_\w+)"', text))
    assert "VLMSERVE_ISAS" in read
    assert read <= OTHER_VARIABLES.keys()


def test_other_variables_are_left_alone():
    others = {name: "0" for name in OTHER_VARIABLES if name not in ("VLMSERVE_CONFIG", "VLMSERVE_WORKER")}
    kubernetes = {
        "VLMSERVE_SERVICE_HOST": "10.0.0.1",
        "VLMSERVE_SERVICE_PORT": "8000",
        "VLMSERVE_SERVICE_PORT_HTTP": "8000",
        "VLMSERVE_PORT": "tcp://10.0.0.1:8000",
        "VLMSERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "VLMSERVE_PORT_8000_TCP_PORT": "8000",
        "VLMSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "VLMSERVE_CPU_PORT": "tcp://10.0.0.1:8000",
        "VLMSERVE_CPU_SERVICE_HOST": "10.0.0.1",
    }
    given = give(**others, **kubernetes)
    assert (given.exit_code, given.port, given.origins) == (0, 8000, {})
    refused(give(VLMSERVE_PORT="http://10.0.0.1"), "VLMSERVE_PORT")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    refused(give("--config", tmp_path / "no.toml"), "--config", "no.toml", "No such file")
    refused(give(VLMSERVE_CONFIG=str(tmp_path)), "VLMSERVE_CONFIG", "directory")
    (tmp_path / "a.yaml").write_text("port: 3")
    refused(give("--config", tmp_path / "a.yaml"), "YAML is not read")
    (tmp_path / "latin.toml").write_bytes(b'[server]\nhost = "\xe9"')
    refused(give("--config", tmp_path / "latin.toml"), "UTF-8")
    (tmp_path / "large.toml").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    refused(give("--config", tmp_path / "large.toml"), str(MAX_FILE_BYTES))


# Other commands


def test_command_takes_sources_of_its_own_fields(write):
    received = []
    probe = typer.Typer()

    @probe.command()
    @command(("dtype",))
    def small(engine: EngineConfig, media: MediaConfig) -> None:
        received.append((engine, media))

    path = write('[engine]\ndtype = "float32"\nseed = 9\n[server]\nport = 1\n')
    result = CliRunner(env=CLEAN | {"VLMSERVE_MAX_IMAGES": "1"}).invoke(probe, ["--config", str(path)])
    assert result.exit_code == 0, result.output
    assert received == [(EngineConfig(dtype="float32"), MediaConfig())]
    assert received[0][0].model_fields_set == {"dtype"}


@pytest.mark.parametrize(
    "line", ["ask hi", "chat", "bench", "verify x", "quantize x y", "eval pixie", "eval perplexity x"]
)
def test_every_command_with_a_model_reads_them(line):
    result = CliRunner(env=CLEAN | {"VLMSERVE_PROT": "1"}).invoke(cli.app, line.split())
    assert (result.exit_code, "VLMSERVE_PORT?" in result.stderr) == (2, True)


def test_ask_answers_with_what_the_environment_says(tmp_path):
    from tests.mock_checkpoint import make_mock_checkpoint

    variables = {"VLMSERVE_MODEL": str(make_mock_checkpoint(tmp_path)), "VLMSERVE_ENGINE": "mock"}
    result = CliRunner(env=CLEAN | variables).invoke(cli.app, ["ask", "Well?"])
    assert (result.exit_code, len(result.stdout) > 1) == (0, True)


# The models themselves


def test_no_two_sections_share_a_field_name():
    names = [name for kind in SECTIONS.values() for name in kind.model_fields]
    assert len(names) == len(set(names))
    assert {"engine", "media", "server"} <= set(SECTIONS)


def test_what_may_be_unset_is_unset_by_default():
    """A file cannot say that there is no value."""
    fields = [field for kind in SECTIONS.values() for field in kind.model_fields.values()]
    assert not [field for field in fields if type(None) in getattr(field.annotation, "__args__", ()) and field.default]


class Guarded(Settings):
    keys: tuple[SecretStr, ...] = Field((), description="Keys.")
    count: int = Field(0, description="Count.", repr=False)


@pytest.mark.parametrize("values", [{"keys": "[hush"}, {"keys": [{"hush": 1}]}, {"count": "hush"}])
def test_an_error_does_not_tell_a_secret(values):
    with pytest.raises(ConfigurationError, match=next(iter(values))) as caught:
        read_settings(Guarded, values)
    assert "hush" not in str(caught.value)


def test_secrets_are_read_from_text():
    assert [key.get_secret_value() for key in read_settings(Guarded, {"keys": "a,b"}).keys] == ["a", "b"]


@pytest.mark.parametrize(("name", "value"), [("port", True), ("shutdown_grace", False), ("host", True)])
def test_booleans_are_neither_numbers_nor_texts(name, value):
    with pytest.raises(ConfigurationError, match=name):
        read_settings(ServerConfig, {name: value})
