"""The commands. Each imports what it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vlmserve.cli.cluster import cluster, gateway, worker
from vlmserve.cli.embed import embed
from vlmserve.cli.evaluations import evaluations
from vlmserve.cli.fields import ANSWER_FIELDS, QUANTIZATION_FIELDS, flag
from vlmserve.cli.help import HelpfulCommand, group
from vlmserve.cli.keys import keys
from vlmserve.cli.options import command, schemes
from vlmserve.cli.serve import COMMON_FIELDS, Model, serve
from vlmserve.cli.sources import Origins
from vlmserve.cli.spellings import SettingsCommand
from vlmserve.errors import ConfigurationError
from vlmserve.loadtest.settings import GoalConfig, LoadConfig, TargetConfig, TestConfig, WorkloadConfig
from vlmserve.sampling_params import SamplingParams
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import BUILT_IN_MODEL, EngineConfig, MediaConfig, ServerConfig
from vlmserve.settings.quantization import QuantizationConfig

app = group(help="Serve vision-language models over an OpenAI-compatible API.\n\nExample: vlmserve serve qwen3-vl:2b")


def _print_version(wanted: bool) -> None:
    if wanted:
        import vlmserve

        typer.echo(vlmserve.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-v", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Serve vision-language models over an OpenAI-compatible API."""


USE, MODELS, MEASURE, OPERATE = "Use a model", "Models", "Measure and check", "Operate"
"""Groups of commands in the help."""

COMMON_LOAD_FIELDS = (
    "model", "num_prompts", "random_input_len", "random_output_len", "images", "image_size", "image_reuse", "turns",
    "dataset_path", "max_concurrency", "request_rate", "duration", "slo", "find_rate"
)  # fmt: skip
"""Flags that `vlmserve loadtest --help` shows."""

Url = Annotated[str | None, typer.Option(help="Ask this server instead of loading a model (key: VLMSERVE_API_KEY).")]
MaxTokens = Annotated[
    int | None, typer.Option(metavar="INT", min=1, help="Maximum tokens of the answer (default: no limit).")
]
Temperature = Annotated[float, typer.Option(metavar="FLOAT", min=0, help="Sampling temperature; 0 is greedy.")]


def _sampling(temperature: float, max_tokens: int | None) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens)


app.command(cls=SettingsCommand, rich_help_panel=USE)(serve)


@app.command(cls=SettingsCommand, rich_help_panel=USE)
@command(ANSWER_FIELDS)
def ask(
    engine: EngineConfig,
    media: MediaConfig,
    words: Annotated[
        list[str], typer.Argument(metavar="[FILE]... [QUESTION]", help="Paths or URLs, and the question (-: stdin).")
    ],
    url: Url = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    pages: Annotated[
        str | None, typer.Option(metavar="PAGES", help="Pages of documents, like 1-3,7 (default: all).")
    ] = None,
) -> None:
    """Ask one question about any number of images and documents.

    A captioning model like BLIP needs no question; it continues a given text.

    Example: vlmserve ask photo.png "What is this?"
    """
    from vlmserve.cli.ask import Question, print_answer

    question = Question.read(words, pages)
    print_answer(engine, media, url, question, _sampling(temperature, max_tokens))


@app.command(cls=SettingsCommand, rich_help_panel=USE)
@command(ANSWER_FIELDS)
def chat(
    engine: EngineConfig,
    media: MediaConfig,
    model: Model = BUILT_IN_MODEL,
    url: Url = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
) -> None:
    """Chat in the terminal; /image PATH sends an image.

    Example: vlmserve chat qwen3-vl:2b
    """
    from vlmserve.cli.chat import run_chat

    run_chat(engine, media, url, _sampling(temperature, max_tokens))


@app.command(cls=SettingsCommand, rich_help_panel=USE)
@command(ANSWER_FIELDS)
def run(
    engine: EngineConfig,
    media: MediaConfig,
    model: Model,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]... [QUESTION]", help="Ask one question instead.")
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
) -> None:
    """Download a model if needed, then chat with it, or answer one question.

    Example: vlmserve run qwen3-vl:2b "What is this?" photo.jpg
    """
    from vlmserve.cli.ask import Question, print_answer
    from vlmserve.cli.chat import run_chat

    params = _sampling(temperature, max_tokens)
    if words:
        print_answer(engine, media, None, Question.read(words), params)
    else:
        run_chat(engine, media, None, params)


@app.command(cls=HelpfulCommand, rich_help_panel=MODELS)
@command()
def pull(
    model: Annotated[str, typer.Argument(help="Short name, or Hugging Face id like owner/name or owner/name:Q4_K_M.")],
    revision: Annotated[str | None, typer.Option(metavar="TEXT", help="Branch, tag or commit.")] = None,
) -> None:
    """Download a model from the Hugging Face hub.

    Example: vlmserve pull qwen3-vl:2b
    """
    from vlmserve.cli.downloads import run_pull

    run_pull(model, revision)


@app.command("list", cls=HelpfulCommand, rich_help_panel=MODELS)
@command()
def list_() -> None:
    """List downloaded models with their size on disk.

    Example: vlmserve list
    """
    from vlmserve.cli.downloads import show_downloads

    show_downloads()


@app.command(cls=HelpfulCommand, rich_help_panel=MODELS)
@command()
def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Short names or Hugging Face ids.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove downloaded models from this machine.

    Example: vlmserve rm qwen3-vl:2b
    """
    from vlmserve.cli.downloads import run_rm

    run_rm(models, sure=yes)


@app.command(cls=SettingsCommand, rich_help_panel=USE)
@command(ANSWER_FIELDS)
def batch(
    engine: EngineConfig,
    media: MediaConfig,
    source: Annotated[
        str,
        typer.Argument(metavar="INPUT", help="Image folder, quoted pattern, .txt list, .csv, .jsonl, or OpenAI batch."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Results: .jsonl, .csv or .parquet.")],
    prompt: Annotated[str | None, typer.Option(help="Question per row; {name} inserts a column.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON schema of the answers.", exists=True, dir_okay=False)
    ] = None,
    url: Url = None,
    concurrency: Annotated[int, typer.Option(metavar="INT", min=1, help="Concurrent requests, with --url.")] = 32,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    seed: Annotated[int | None, typer.Option(metavar="INT", help="Seed, for repeatable answers.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Retry rows that failed in the last run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite the results.")] = False,
) -> None:
    """Answer a question about each image of a folder, or each row of a file.

    The same command continues an interrupted run. The exit status is 1 if a row failed.

    Example: vlmserve batch photos --prompt "Describe this." -o captions.jsonl
    """
    from vlmserve.cli.batch import run

    complete = run(
        engine,
        media,
        source,
        prompt,
        system,
        output,
        schema=schema,
        url=url,
        served_model=engine.model if "model" in engine.model_fields_set else None,
        concurrency=concurrency,
        params={"temperature": temperature, "max_tokens": max_tokens, "seed": seed},
        retry=retry,
        overwrite=overwrite,
    )
    if not complete:
        raise typer.Exit(1)


app.command(cls=SettingsCommand, rich_help_panel=USE)(embed)


@app.command(cls=SettingsCommand, rich_help_panel=MEASURE)
@command(("revision", "mmproj", "device", "dtype", "kernels", "kv_cache_memory", "kv_cache_dtype", "num_threads"))
def bench(
    engine: EngineConfig,
    model: Annotated[str, typer.Argument(help="Short name, local folder or .gguf file, or Hugging Face id.")] = (
        BUILT_IN_MODEL
    ),
    scheme: Annotated[
        list[str] | None, typer.Option(metavar="none|int8|int4|w8a8", help="Repeatable (default: all but w8a8).")
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            "--concurrency", metavar="INT", min=1, help="Concurrent requests (repeatable; default: 1, 16 and 64)."
        ),
    ] = None,
    all_kernels: Annotated[
        bool, typer.Option("--all-kernels", help="Measure all instruction sets of this machine, and torch.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare/--no-compare", help="Also measure torch's kernels.")] = True,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the results to this file.")] = None,
) -> None:
    """Measure prefill, decode and vision throughput, compared with this machine's limits and torch.

    Example: vlmserve bench pixie --scheme int8
    """
    from vlmserve.cli.bench import run_bench

    run_bench(engine, schemes(scheme), tuple(concurrency or (1, 16, 64)), json, every=all_kernels, compare=compare)


@app.command(cls=SettingsCommand, rich_help_panel=MEASURE)
@command(common=COMMON_LOAD_FIELDS)
def loadtest(
    target: TargetConfig,
    workload: WorkloadConfig,
    load: LoadConfig,
    goal: GoalConfig,
    url: Annotated[str, typer.Argument(help="Server with an OpenAI-compatible API, like http://127.0.0.1:8000.")],
    output: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", metavar="FILE", help="Report: .json, .md or .html (repeatable)."),
    ] = None,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="Include every request in the JSON.")] = False,
) -> None:
    """Measure a server under load.

    Flags have the names of `vllm bench serve`. The exit status is 1 if no request succeeded.

    Example: vlmserve loadtest http://127.0.0.1:8000 --request-rate 4
    """
    from vlmserve.cli.loadtest import run_loadtest

    config = TestConfig(url=url, target=target, workload=workload, load=load, goal=goal)
    if not run_loadtest(config, output or [], detailed=save_detailed):
        raise typer.Exit(1)


@app.command(cls=SettingsCommand, rich_help_panel=MEASURE)
@command(("revision", "device", "dtype", "model_impl", "kernels", "kv_cache_memory", "num_threads"))
def verify(
    engine: EngineConfig,
    model: Annotated[str, typer.Argument(help="Short name, local folder or .gguf file, or Hugging Face id.")],
    images: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of images (default: drawn images).")
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="INT", min=1, help="Tokens of each answer.")] = 32,
) -> None:
    """Compare a checkpoint's logits and greedy tokens with Transformers.

    Both compute in float32 unless --dtype says otherwise. The exit status is 1 if they differ.

    Example: vlmserve verify pixie
    """
    from vlmserve.cli.verify import run_verify

    if not run_verify(engine, images, tokens):
        raise typer.Exit(1)


@app.command(cls=SettingsCommand, rich_help_panel=MODELS)
@command(("revision", "mmproj", "kernels", "num_threads", *QUANTIZATION_FIELDS))
def quantize(
    engine: EngineConfig,
    how: QuantizationConfig,
    model: Annotated[str, typer.Argument(help="Local folder or .gguf file, or Hugging Face repository id.")],
    out: Annotated[Path | None, typer.Argument(help="A new folder, or an unfinished one to continue.")] = None,
    bits: Annotated[
        Literal["8", "4"], typer.Option(metavar="8|4", help="Bits per weight; output heads keep at least 8.")
    ] = "8",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the memory that the model would take.")] = False,
) -> None:
    """Write a checkpoint with 8-bit or 4-bit weights.

    Every command loads the folder like any other. With --bits 8, --symmetric or --zero-points, other servers can read
    it too (compressed-tensors).

    Example: vlmserve quantize qwen3-vl:2b my-model --method gptq --bits 4
    """
    given = how.model_dump(exclude_unset=True)
    how = read_settings(QuantizationConfig, {**given, "scheme": f"int{bits}"}, flag)
    if dry_run:
        from vlmserve.cli.estimate import show_estimate

        show_estimate(engine, how)
        return
    if out is None:
        raise ConfigurationError("say where to write: vlmserve quantize MODEL OUT")
    from vlmserve.cli.quantize import run_quantize

    run_quantize(engine, how, out)


@app.command(cls=SettingsCommand, rich_help_panel=MODELS)
@command(("weights_cache", "weights_cache_size", "disk_cache", "disk_cache_memory"))
def cache(
    engine: EngineConfig,
    action: Annotated[
        Literal["stats", "clear"], typer.Argument(metavar="[stats|clear]", help="Show or remove cached files.")
    ] = "stats",
) -> None:
    """Show or remove cached files: packed weights, the disk cache and the step times of drafts.

    Example: vlmserve cache stats
    """
    from vlmserve.cli.cache import clear_cache, show_cache

    clear_cache(engine) if action == "clear" else show_cache(engine)


@app.command(cls=HelpfulCommand, rich_help_panel=MEASURE)
@command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what this machine has for serving: kernels, memory, GPUs, extras, and which models fit.

    The exit status is 1 if something needs fixing.

    Example: vlmserve doctor
    """
    from vlmserve.cli.doctor import run_doctor

    if not run_doctor(as_json=as_json):
        raise typer.Exit(1)


@app.command(cls=SettingsCommand, rich_help_panel=OPERATE)
@command(common=COMMON_FIELDS)
def config(
    engine: EngineConfig,
    media: MediaConfig,
    server: ServerConfig,
    origins: Origins,
    model: Model = BUILT_IN_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with the source of each setting.")] = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="Print a complete file for --config.")] = False,
    reference: Annotated[bool, typer.Option("--reference", help="Print all settings as Markdown.")] = False,
) -> None:
    """Show the settings that serve would use with the same flags, and where each comes from.

    Example: vlmserve config --max-model-len 4096
    """
    from vlmserve.cli import effective
    from vlmserve.cli.reference import reference_page

    if as_json + as_toml + reference > 1:
        raise ConfigurationError("give only one of --json, --toml and --reference")
    settings = {"server": server, "engine": engine, "media": media}
    if reference:
        print(reference_page(), end="")
    elif as_json:
        print(effective.as_json(settings, origins))
    elif as_toml:
        print(effective.as_toml(settings, origins), end="")
    else:
        effective.show(settings, origins)


@app.command(cls=HelpfulCommand, rich_help_panel=OPERATE)
@command()
def version() -> None:
    """Print the version.

    Example: vlmserve version
    """
    _print_version(True)


@app.command(cls=HelpfulCommand, rich_help_panel=MODELS)
@command()
def models(
    families: Annotated[bool, typer.Option("--families", help="List supported architectures instead.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
) -> None:
    """List short names of models, their memory, and which fit this machine.

    Commands also take a folder, a Hugging Face repository or a .gguf file.

    Example: vlmserve models --families
    """
    from vlmserve.cli.models import show_models

    show_models(as_markdown=as_markdown, families=families)


@app.command("merge-lora", cls=HelpfulCommand, rich_help_panel=MODELS)
@command()
def merge_lora(
    model: Annotated[str, typer.Argument(help="Local folder or Hugging Face id of the model.")],
    adapter: Annotated[str, typer.Argument(help="Local folder or Hugging Face id of the adapter.")],
    out: Annotated[Path, typer.Argument(help="A new folder for the merged checkpoint.")],
) -> None:
    """Write a checkpoint with a LoRA adapter merged into its weights.

    Example: vlmserve merge-lora qwen3-vl:2b my-adapter my-model
    """
    from rich.console import Console
    from rich.progress import Progress

    from vlmserve.adapters.location import find_adapter
    from vlmserve.adapters.merge import merge_adapter
    from vlmserve.cli.tables import add_bar
    from vlmserve.models.hub import resolve_model

    with Progress(console=Console(stderr=True)) as progress:
        changed = merge_adapter(resolve_model(model), find_adapter(adapter), out, add_bar(progress, "Merging"))
    Console().print(f"{changed} tensors changed. Try it: vlmserve serve {out}", highlight=False, soft_wrap=True)


app.add_typer(evaluations, name="eval", rich_help_panel=MEASURE)
app.add_typer(keys, name="keys", rich_help_panel=OPERATE)
app.add_typer(cluster, name="cluster", rich_help_panel=OPERATE)
app.command(cls=SettingsCommand, rich_help_panel=OPERATE)(worker)
app.command(cls=SettingsCommand, rich_help_panel=OPERATE)(gateway)
