"""The commands; each is a thin call into another package, which is imported when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vlmserve.cli.cluster import cluster, gateway, worker
from vlmserve.cli.embed import embed
from vlmserve.cli.evaluations import evaluations
from vlmserve.cli.fields import LOCAL_FIELDS, QUANTIZATION_FIELDS, flag
from vlmserve.cli.help import HelpfulCommand, group
from vlmserve.cli.keys import keys
from vlmserve.cli.options import command, schemes
from vlmserve.cli.sources import Origins
from vlmserve.cli.spellings import SettingsCommand
from vlmserve.errors import ConfigurationError
from vlmserve.loadtest.settings import GoalConfig, LoadConfig, TargetConfig, TestConfig, WorkloadConfig
from vlmserve.sampling_params import SamplingParams
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import BUILT_IN_MODEL, EngineConfig, MediaConfig, ServerConfig
from vlmserve.settings.quantization import QuantizationConfig

app = group(help="Serve vision-language models over an OpenAI-compatible API.")


def _print_version(wanted: bool) -> None:
    if wanted:
        import vlmserve

        typer.echo(vlmserve.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Serve vision-language models over an OpenAI-compatible API."""


USE, MODELS, MEASURE, OPERATE = "Use a model", "Models", "Measure and check", "Operate"
"""Groups of commands in the help."""

COMMON_FIELDS = (
    "mmproj", "host", "port", "served_model_name", "api_key", "api_keys_file", "device", "tensor_parallel_size",
    "dtype", "quantize", "max_model_len", "max_num_seqs", "kv_cache_memory", "kv_cache_dtype", "memory_fraction",
    "chat_template", "max_images", "allowed_media_path", "log_prompts",
)  # fmt: skip
"""Settings that most servers are started with."""

COMMON_LOAD_FIELDS = (
    "model", "num_prompts", "random_input_len", "random_output_len", "images", "image_size", "image_reuse", "turns",
    "dataset_path", "max_concurrency", "request_rate", "duration", "slo", "find_rate",
)  # fmt: skip
"""Settings that most load tests are run with."""

Url = Annotated[
    str | None,
    typer.Option(help="Ask the server at this URL instead of loading a model; its key is in VLMSERVE_API_KEY."),
]
MaxTokens = Annotated[
    int | None, typer.Option(metavar="INT", min=1, help="Largest number of tokens in the answer; default: no limit.")
]
Temperature = Annotated[float, typer.Option(metavar="FLOAT", min=0, help="0: always take the likeliest token.")]
Model = Annotated[str, typer.Argument(help=str(EngineConfig.model_fields["model"].description))]


def _sampling(temperature: float, max_tokens: int | None) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens)


@app.command(cls=SettingsCommand, rich_help_panel=USE)
@command(common=COMMON_FIELDS)
def serve(
    engine: EngineConfig,
    media: MediaConfig,
    server: ServerConfig,
    model: Model = BUILT_IN_MODEL,
) -> None:
    """Serve a model over an OpenAI-compatible API.

    Every flag is also an environment variable (VLMSERVE_MAX_MODEL_LEN for --max-model-len) and a key in the file that
    --config names; `vlmserve config` shows the resulting settings. vLLM's names of flags are accepted as well.
    """
    from vlmserve.server import run

    run.serve(engine, media, server)


@app.command(cls=SettingsCommand, rich_help_panel=USE)
@command(LOCAL_FIELDS)
def ask(
    engine: EngineConfig,
    media: MediaConfig,
    words: Annotated[
        list[str], typer.Argument(metavar="[FILE]... [QUESTION]", help="Paths or URLs, and the question; -: stdin.")
    ],
    url: Url = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    pages: Annotated[
        str | None, typer.Option(metavar="PAGES", help="Pages of documents to show, like 1-3,7; default: all.")
    ] = None,
) -> None:
    """Ask one question about any number of images and documents.

    For example: vlmserve ask photo.png "What is this?" The question may also come first, or from standard input:
    vlmserve ask photo.png - < question.txt. Captioning models like BLIP need no question; a text is how the caption
    begins.
    """
    from vlmserve.cli.ask import Question, print_answer

    question = Question.read(words, pages)
    print_answer(engine, media, url, question, _sampling(temperature, max_tokens))


@app.command(cls=SettingsCommand, rich_help_panel=USE)
@command(LOCAL_FIELDS)
def chat(
    engine: EngineConfig,
    media: MediaConfig,
    model: Model = BUILT_IN_MODEL,
    url: Url = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
) -> None:
    """Chat in the terminal; /image PATH sends an image.

    For example: vlmserve chat qwen3-vl:2b
    """
    from vlmserve.cli.chat import run_chat

    run_chat(engine, media, url, _sampling(temperature, max_tokens))


@app.command(cls=SettingsCommand, rich_help_panel=USE)
@command(LOCAL_FIELDS)
def run(
    engine: EngineConfig,
    media: MediaConfig,
    model: Model,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]... [QUESTION]", help="To ask one question instead.")
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
) -> None:
    """Download a model if needed, then chat with it, or answer one question.

    For example: vlmserve run qwen3-vl:2b, or vlmserve run qwen3-vl:2b "What is this?" photo.jpg
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

    For example: vlmserve pull qwen3-vl:2b
    """
    from vlmserve.cli.downloads import run_pull

    run_pull(model, revision)


@app.command("list", cls=HelpfulCommand, rich_help_panel=MODELS)
@command()
def list_() -> None:
    """List downloaded models with their size on disk."""
    from vlmserve.cli.downloads import show_downloads

    show_downloads()


@app.command(cls=HelpfulCommand, rich_help_panel=MODELS)
@command()
def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Short names or Hugging Face ids.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove downloaded models from this machine.

    For example: vlmserve rm qwen3-vl:2b
    """
    from vlmserve.cli.downloads import run_rm

    run_rm(models, sure=yes)


@app.command(cls=SettingsCommand, rich_help_panel=USE)
@command(LOCAL_FIELDS)
def batch(
    engine: EngineConfig,
    media: MediaConfig,
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="A folder of images, a quoted pattern like 'photos/*.jpg', a list of paths or URLs (.txt), rows with "
            "a column image or images (.csv, .jsonl), or requests in OpenAI's batch form (.jsonl).",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Results: .jsonl, .csv or .parquet.")],
    prompt: Annotated[
        str | None,
        typer.Option(help="What to ask of each row; {name} stands for the column of that name. None for requests."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON schema that answers fit.", exists=True, dir_okay=False)
    ] = None,
    url: Url = None,
    concurrency: Annotated[int, typer.Option(metavar="INT", min=1, help="Requests at a time, with --url.")] = 32,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    seed: Annotated[int | None, typer.Option(metavar="INT", help="Makes answers repeatable at a temperature.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Ask rows again that failed in the last run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of results.")] = False,
) -> None:
    """Answer a question about each image of a folder, or each row of a file.

    For example: vlmserve batch photos --prompt "Describe this image." --output captions.jsonl. The same
    command continues an interrupted run. The exit status is 1 if a row failed.
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
        list[str] | None, typer.Option(metavar="none|int8|int4|w8a8", help="May be repeated; default: all but w8a8.")
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            "--concurrency", metavar="INT", min=1, help="Concurrent requests; may be repeated. Default: 1, 16 and 64."
        ),
    ] = None,
    all_kernels: Annotated[
        bool, typer.Option("--all-kernels", help="Measure every instruction set that this machine has, and torch.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare/--no-compare", help="Measure torch's kernels as well.")] = True,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the results to this file.")] = None,
) -> None:
    """Measure prefill, decode and vision throughput, and compare it with this machine's limits and with torch."""
    from vlmserve.cli.bench import run_bench

    run_bench(engine, schemes(scheme), tuple(concurrency or (1, 16, 64)), json, every=all_kernels, compare=compare)


@app.command(cls=SettingsCommand, rich_help_panel=MEASURE)
@command(common=COMMON_LOAD_FIELDS)
def loadtest(
    target: TargetConfig,
    workload: WorkloadConfig,
    load: LoadConfig,
    goal: GoalConfig,
    url: Annotated[str, typer.Argument(help="A server with an OpenAI-compatible API, like http://127.0.0.1:8000.")],
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="A file for the report: .json, .md, .html; may be repeated."
        ),
    ] = None,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="Include every request in the JSON.")] = False,
) -> None:
    """Measure a server under load.

    For example: vlmserve loadtest http://127.0.0.1:8000 --request-rate 4. Flags have the names that they have in
    `vllm bench serve` where they mean the same. The exit status is 1 if no request succeeded.
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
        Path | None, typer.Option(metavar="FOLDER", help="A folder with images; default: drawn ones.")
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="INT", min=1, help="Number of tokens of each answer.")] = 32,
) -> None:
    """Compare a checkpoint's logits and greedy tokens with Transformers.

    Both compute in float32 unless --dtype says otherwise. The exit status is 1 if they differ.
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
    out: Annotated[Path | None, typer.Argument(help="A new folder, or an unfinished one to go on with.")] = None,
    bits: Annotated[
        Literal["8", "4"], typer.Option(metavar="8|4", help="Bits of weights; output heads have 8 at least.")
    ] = "8",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show how much memory the model would take.")] = False,
) -> None:
    """Write a checkpoint whose weights have 8 or 4 bits.

    For example: vlmserve quantize MODEL OUT --method gptq --bits 4. All commands load the folder like any other. With 8
    bits, --symmetric or --zero-points it is in the compressed-tensors format, which other servers read as well.
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
        Literal["stats", "clear"], typer.Argument(metavar="[stats|clear]", help="Show files, or remove them all.")
    ] = "stats",
) -> None:
    """Show or remove files that later starts read: packed weights, and the disk cache."""
    from vlmserve.cli.cache import clear_cache, show_cache

    clear_cache(engine) if action == "clear" else show_cache(engine)


@app.command(cls=HelpfulCommand, rich_help_panel=MEASURE)
@command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what this machine has for serving: kernels, memory, GPUs, extras, and how large a model fits.

    The exit status is 1 if something should be fixed.
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
    reference: Annotated[bool, typer.Option("--reference", help="Print all settings as a page of Markdown.")] = False,
) -> None:
    """Show the settings of serve with the same flags, and where each comes from."""
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
    """Print the version."""
    import vlmserve

    typer.echo(vlmserve.__version__)


@app.command(cls=HelpfulCommand, rich_help_panel=MODELS)
@command()
def models(
    families: Annotated[bool, typer.Option("--families", help="List supported architectures instead.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables of the documentation.")] = False,
) -> None:
    """List short names of models with the memory that their weights need, and which fit here.

    Every command that takes a model takes a short name, a folder, a repository of the Hugging Face hub or a .gguf
    file.
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
    """Write a checkpoint with a LoRA adapter merged into its weights."""
    from rich.console import Console
    from rich.progress import Progress

    from vlmserve.adapters.location import find_adapter
    from vlmserve.adapters.merge import merge_adapter
    from vlmserve.models.hub import resolve_model

    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("Merging")
        changed = merge_adapter(
            resolve_model(model),
            find_adapter(adapter),
            out,
            lambda done, total: progress.update(bar, completed=done, total=total),
        )
    Console().print(f"{changed} tensors changed. Try it: vlmserve serve {out}", highlight=False, soft_wrap=True)


app.add_typer(evaluations, name="eval", rich_help_panel=MEASURE)
app.add_typer(keys, name="keys", rich_help_panel=OPERATE)
app.add_typer(cluster, name="cluster", rich_help_panel=OPERATE)
app.command(cls=SettingsCommand, rich_help_panel=OPERATE)(worker)
app.command(cls=SettingsCommand, rich_help_panel=OPERATE)(gateway)
