"""Command lines as users of vLLM and llama.cpp write them."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from tests.cli.probe import CLEAN, give
from vlmserve import cli
from vlmserve.cli.fields import SECTIONS, flag
from vlmserve.cli.spellings import Spelling
from vlmserve.errors import ConfigurationError
from vlmserve.settings import vllm_flags as vllm
from vlmserve.settings.config import ProcessorOverrides

OWN = {flag(name) for kind in SECTIONS.values() for name in kind.model_fields}
RENAMED = {name: entry for name, entry in vllm.FLAGS.items() if isinstance(entry, vllm.Renamed)}
UNUSED = {name: entry for name, entry in vllm.FLAGS.items() if isinstance(entry, vllm.Unused) and name not in OWN}
MISSING = {name: entry for name, entry in vllm.FLAGS.items() if isinstance(entry, vllm.Missing) and name not in OWN}

EXAMPLES = [
    ("--gpu-memory-utilization 0.5", {"memory_fraction": 0.5}),
    ("-tp 2", {"tensor_parallel_size": 2}),
    ("--tensor-parallel-size 2", {"tensor_parallel_size": 2}),
    ("--gpu-memory-utilization=0.5", {"memory_fraction": 0.5}),
    ("--gpu_memory_utilization 0.5", {"memory_fraction": 0.5}),
    ("--kv-cache-memory-bytes 1048576", {"kv_cache_memory": 2**20}),
    ("--swap-space 2", {"kv_offload_memory": 2 * 2**30}),
    ("--swap-space 0.5", {"kv_offload_memory": 2**29}),
    ("--swap-space 512MiB", {"kv_offload_memory": 2**29}),
    ("--kv-offloading-size 1", {"kv_offload_memory": 2**30}),
    ("--mm-processor-cache-gb 4", {"image_cache_memory": 4 * 2**30}),
    ("--disable-mm-preprocessor-cache", {"image_cache_memory": 0}),
    ("--disable-log-stats", {"stats_interval": 0}),
    ('--limit-mm-per-prompt {"image":4,"video":1}', {"max_images": 4, "max_videos": 1}),
    ("--limit-mm-per-prompt.video.count 2 --limit-mm-per-prompt.image 1", {"max_images": 1, "max_videos": 2}),
    ('--limit-mm-per-prompt {"video":{"count":3,"num_frames":8},"audio":0}', {"max_videos": 3, "max_images": 16}),
    ("--limit-mm-per-prompt=image=4,video=1", {"max_images": 4, "max_videos": 1}),
    ("--limit-mm-per-prompt.image 5 --limit-mm-per-prompt.video=6", {"max_images": 5, "max_videos": 6}),
    ("--mm-processor-kwargs.max_pixels 900", {"mm_processor_kwargs": ProcessorOverrides(max_pixels=900)}),
    ("./mine --allowed-media-domains a.com b.com", {"allowed_media_domains": ("a.com", "b.com")}),
    ("--disable-uvicorn-access-log", {"access_log": False}),
    ("./mine --allowed-local-media-path /tmp", {"allowed_media_path": "/tmp"}),
    ("--h11-max-incomplete-event-size 65536", {"max_header_bytes": 65536}),
    ("--enable-log-requests", {"log_prompts": True}),
    ("--disable-log-requests", {"log_prompts": False}),
    ("--no-enable-log-requests", {"log_prompts": False}),
    ("--uvicorn-log-level warning", {"access_log": False}),
    ("--uvicorn-log-level=info --seed 1", {"access_log": True, "seed": 1}),
    ('--speculative-config {"model":"./small","num_speculative_tokens":4}', {"draft_model": "./small"}),
    ('--speculative-config {"method":"ngram"}', {"draft_model": None}),
    ("--speculative-config.model ./small", {"draft_model": "./small"}),
    ("--speculative-model ./small", {"draft_model": "./small"}),
    ("--speculative-model [ngram]", {"draft_model": None}),
    ('--speculative-config {"method":"ngram","model":"ngram"}', {"draft_model": None}),
    ("-hfd owner/small", {"draft_model": "owner/small"}),
    ("-md ./small", {"draft_model": "./small"}),
    ("--dtype half", {"dtype": "float16"}),
    ("--dtype=float", {"dtype": "float32"}),
    ("--model-impl vllm", {"model_impl": "vlmserve"}),
    ("--max_model_len 77", {"max_model_len": 77}),
    ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
    ("--no_enable_prefix_caching", {"enable_prefix_caching": False}),
    ("--model ./mine", {"model": "./mine"}),
    ("-m ./mine -c 77 -np 3", {"model": "./mine", "max_model_len": 77, "max_num_seqs": 3}),
    ("-hf owner/name:Q4_K_M --ctx-size 0", {"model": "owner/name:Q4_K_M", "max_model_len": None}),
    ("-ngl 0 --threads 2", {"device": "cpu", "num_threads": 2}),
    ("-ngl 99 --alias a", {"device": "auto", "served_model_name": ("a",)}),
    ("--kv-cache-dtype fp8_e4m3", {"kv_cache_dtype": "fp8"}),
    ("-ctk q8_0 -ctv q8_0 -b 512", {"kv_cache_dtype": "int8", "max_num_batched_tokens": 512}),
    ("--model=./mine --seed 3", {"model": "./mine", "seed": 3}),
    ("./mine --served-model-name a b --port 1", {"served_model_name": ("a", "b"), "model": "./mine", "port": 1}),
    ("--served-model-name a ./mine", {"served_model_name": ("a",), "model": "./mine"}),
    ("--served-model-name a --served-model-name b ./mine", {"served_model_name": ("a", "b"), "model": "./mine"}),
    ("./mine --allowed-media-hosts a b c", {"allowed_media_hosts": ("a", "b", "c")}),
    ("--seed 3 -- --seed", {"seed": 3, "model": "--seed"}),
    ("--gpu-memory-utilization 0.5 --memory-fraction 0.6", {"memory_fraction": 0.6}),
]


@pytest.mark.parametrize(("line", "expected"), EXAMPLES, ids=[line for line, _ in EXAMPLES])
def test_vllms_flags_set_what_they_mean(line, expected):
    given = give(*line.split())
    assert (given.exit_code, given.stderr) == (0, "")
    assert {name: getattr(given, name) for name in expected} == expected


def test_there_is_an_example_of_each_renamed_flag():
    lines = " ".join(line for line, _ in EXAMPLES)
    assert [name for name in RENAMED if name not in lines] == []
    assert [value for others in vllm.VALUES.values() for value in others if value not in lines] == []


def test_a_flag_is_named_as_it_was_typed():
    assert give("--gpu-memory-utilization", "0.5").origins == {"memory_fraction": "--gpu-memory-utilization"}
    assert give("--disable-uvicorn-access-log", "--no-access-log").origins == {"access_log": "--no-access-log"}
    later = give("--gpu-memory-utilization", "0.5", "--memory-fraction", "0.6")
    assert later.origins == {"memory_fraction": "--memory-fraction"}
    assert "--gpu-memory-utilization" in give("--gpu-memory-utilization", "x").stderr
    assert give("--swap-space", "lots").stderr.startswith("Error: --swap-space lots: ")


@pytest.mark.parametrize("name", UNUSED)
def test_flags_without_effect_are_reported_in_one_line(name):
    entry = UNUSED[name]
    given = give(name, *([] if entry.is_switch else [(entry.values or ("1",))[0]]), "./mine", "--seed", "3")
    assert given.exit_code == 0
    assert given.stderr == f"Note: {name} changes nothing. {entry.why}\n"
    assert (given.model, given.seed) == ("./mine", 3)
    if entry.values:
        refused = give(name, "other")
        assert (refused.exit_code, refused.stderr) == (2, f"Error: {name} other: {entry.otherwise}\n")


@pytest.mark.parametrize("name", MISSING)
def test_flags_of_missing_features_are_rejected_kindly(name):
    for line in ([name, "1"], [f"{name}=1"], [name]):
        refused = give(*line)
        assert (refused.exit_code, refused.stderr) == (2, f"Error: vlmserve has no {name}. {MISSING[name].why}\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--limit-mm-per-prompt 4", ["--limit-mm-per-prompt", "JSON"]),
        ('--limit-mm-per-prompt {"image":"x"}', ["--limit-mm-per-prompt", "JSON"]),
        ('--limit-mm-per-prompt {"audio":1}', ["audio", "image and video"]),
        ("--uvicorn-log-level loud", ["--uvicorn-log-level loud", "trace, debug, info"]),
        ("--gpu-memory-utilization", ["--gpu-memory-utilization needs a value"]),
        ("--model", ["--model needs a value"]),
        ("--enable-chunked-prefill=False", ["--enable-chunked-prefill takes no value"]),
        ("--disable-log-stats=false", ["--disable-log-stats takes no value"]),
        ("--limit-mm-per-prompt.image 1 --limit-mm-per-prompt.image.count 2", ["image.count", "already"]),
        ("--mm-processor-kwargs.pixels 9", ["--mm-processor-kwargs: there is no key pixels", "max_pixels"]),
        ("--quantization fp8", ["--quantize int8"]),
        ("--kv-cache-dtype fp8_e5m2", ["--kv-cache-dtype fp8_e5m2", "use fp8 (e4m3)", "int8"]),
        ("--kv-cache-dtype bfloat16", ["--kv-cache-dtype bfloat16", "auto", "--dtype", "int8"]),
        ("--no-such-flag", ["--no-such-flag"]),
        ("--top-k 5", ["vlmserve has no --top-k", "generation_config.json"]),
        ("-ctk q4_0", ["q4_0", "q8_0"]),
        ("-fa sometimes", ["-fa sometimes", "on, off or auto"]),
        ("--temp 0.5", ["has no --temp", "generation_config.json"]),
        ("-n 5", ["has no -n", "--default-max-tokens"]),
        ("--max-model-length 3", ["--max-model-length", "did you mean --max-model-len?"]),
    ],
)
def test_wrong_lines_are_explained(line, words):
    given = give(*line.split())
    assert given.exit_code == 2
    assert [word for word in words if word not in given.stderr] == []


def test_llamas_switches_without_effect_leave_the_rest():
    given = give("./mine", "--embedding", "--pooling", "mean")
    assert (given.exit_code, given.pooling) == (0, "mean")
    assert given.stderr.startswith("Note: --embedding changes nothing.")


def test_a_name_as_a_value_is_a_value():
    assert give("--chat-template", "--enforce-eager").chat_template == "--enforce-eager"


def test_words_of_variadic_commands_stay_words():
    line = Spelling({"--help"}, {"--port"}, {"--names"}, None).read(["a", "--names", "b", "c", "--port", "1", "d"])
    assert line.words == ["a", "--names=b", "c", "--port=1", "d"]


def test_a_flag_of_our_own_counts_before_vllms():
    own = Spelling({"--enforce-eager"}, {"--api-key", "--tokenizer"}, set(), 1)
    line = own.read(["--api-key", "k", "--enforce-eager", "--tokenizer=t"])
    assert (line.words, line.notes) == (["--api-key=k", "--enforce-eager", "--tokenizer=t"], [])


@pytest.mark.parametrize("value", ['["a", "b"]', "a,b"])
def test_renamed_list_takes_json_or_commas(monkeypatch, value):
    monkeypatch.setitem(vllm.FLAGS, "--their-names", vllm.Renamed(("names",)))
    line = Spelling(set(), set(), {"--names"}, 1).read(["--their-names", value, "x"])
    assert line.words == ["--names=a", "--names=b", "x"]


def test_command_without_a_setting_rejects_vllms_name():
    line = Spelling(set(), {"--seed"}, set(), 0).read(["--gpu-memory-utilization", "0.5"])
    assert line.words == ["--gpu-memory-utilization", "0.5"]
    with pytest.raises(ConfigurationError, match="--tokenizer"):
        Spelling(set(), {"--seed"}, set(), 0).read(["--tokenizer"])


def test_other_commands_know_vllms_names_too():
    result = CliRunner(env=CLEAN).invoke(cli.app, ["ask", "--model", "./no/such", "--kv-cache-memory-bytes", "1", "hi"])
    assert (result.exit_code, "no folder or file ./no/such" in result.stderr) == (1, True)


# The table


def test_every_target_is_a_setting():
    fields = {name: field for kind in SECTIONS.values() for name, field in kind.model_fields.items()}
    assert {name for entry in RENAMED.values() for name in entry.fields} | set(vllm.VALUES) <= set(fields)
    assert not set(RENAMED) & OWN


def test_what_is_recommended_exists():
    texts = [entry.why for entry in (*UNUSED.values(), *MISSING.values())] + [
        entry.otherwise for entry in UNUSED.values()
    ]
    named = {name for text in texts for name in re.findall(r"--[a-z][a-z0-9-]+", text)}
    assert "--quantize" in named
    assert named <= OWN


def test_every_entry_explains_itself_in_whole_sentences():
    for entry in (*UNUSED.values(), *MISSING.values()):
        assert re.fullmatch(r"[A-Z/`v-].*\.( .*\.)?", entry.why), entry.why
    assert all(entry.otherwise for entry in UNUSED.values() if entry.values)


def test_help_shows_none_of_vllms_names():
    shown = CliRunner(env=CLEAN).invoke(cli.app, ["serve", "--help-all"]).stdout
    words = set(re.findall(r"--[a-z][a-z0-9-]+", shown))
    assert words >= OWN - {"--model"}
    assert not words & (set(vllm.FLAGS) - OWN)
