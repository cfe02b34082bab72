from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmserve.cli.fields import LOCAL_FIELDS, QUANTIZATION_DETAILS
from vlmserve.cli.help import group
from vlmserve.cli.options import command, schemes
from vlmserve.cli.spellings import SettingsCommand
from vlmserve.errors import ConfigurationError
from vlmserve.settings.config import EngineConfig, MediaConfig

evaluations = group(help="Measure how well a model answers.\n\nExample: vlmserve eval pixie")


@evaluations.command("pixie", cls=SettingsCommand)
@command((*LOCAL_FIELDS, *QUANTIZATION_DETAILS, "kernels"))
def eval_pixie(
    engine: EngineConfig,
    media: MediaConfig,
    per_task: Annotated[int, typer.Option(metavar="INT", min=1, help="Held-out examples of each task.")] = 200,
    task: Annotated[
        list[str] | None, typer.Option(help="Only this task (repeatable). Without it: all but those about documents.")
    ] = None,
    mistakes: Annotated[int, typer.Option(metavar="INT", min=0, help="Wrong answers to show per task.")] = 0,
    write: Annotated[bool, typer.Option("--write", help="Write the table into the model's README.md.")] = False,
) -> None:
    """Measure pixie's exact-match accuracy on held-out images.

    Example: vlmserve eval pixie --per-task 20
    """
    from rich.console import Console
    from rich.progress import Progress

    from vlmserve.cli.tables import add_bar
    from vlmserve.models.hub import resolve_model
    from vlmserve.offline.llm import LLM
    from vlmserve.pixie.evaluation import evaluate, greedy_answers, write_card
    from vlmserve.pixie.fonts import held_out_fonts_are_missing
    from vlmserve.pixie.form_evaluation import evaluate_forms
    from vlmserve.pixie.questions import FORM_TASKS, READING_TASKS, TASKS
    from vlmserve.pixie.reading_evaluation import NO_FONTS, evaluate_reading

    known = (*TASKS, *FORM_TASKS, *READING_TASKS)
    if unknown := set(task or ()) - set(known):
        raise ConfigurationError(f"--task {', '.join(sorted(unknown))}: known tasks are {', '.join(known)}")
    wanted = set(task or (*TASKS, *FORM_TASKS))
    folder = resolve_model(engine.model, engine.revision)
    card = folder / "README.md"
    if write and (task or not card.is_file()):
        raise ConfigurationError(
            "--write needs all tasks: leave out --task" if task else f"there is no model card {card}"
        )
    if wanted & set(READING_TASKS) and held_out_fonts_are_missing():
        raise ConfigurationError(NO_FONTS)
    llm = LLM(**engine.model_dump(exclude_unset=True), **media.model_dump(exclude_unset=True))
    with Progress(console=Console(stderr=True)) as progress:
        tasks = [name for name in TASKS if name in wanted]
        bar = add_bar(progress, "Asking") if tasks else None
        report = evaluate(greedy_answers(llm), per_task=per_task, tasks=tasks, progress=bar)
        if forms := [name for name in FORM_TASKS if name in wanted]:
            bar = add_bar(progress, "Asking for forms")
            report.tasks |= evaluate_forms(llm, folder, per_task=per_task, tasks=forms, progress=bar)
        if reading := [name for name in READING_TASKS if name in wanted]:
            bar = add_bar(progress, "Asking about documents")
            report.tasks |= evaluate_reading(llm, per_task=per_task, tasks=reading, progress=bar)
    typer.echo(report.to_markdown())
    endless = sum(result.endless for result in report.tasks.values())
    typer.echo(f"Answers that did not end: {endless}", err=True)
    for name, result in report.tasks.items():
        for mistake in result.mistakes[:mistakes]:
            typer.echo(
                f"{name} {mistake.seed}: {mistake.question!r}: {mistake.answer!r} instead of {mistake.expected!r}"
            )
    if write:
        write_card(card, report)
        typer.echo(f"Written into {card}")


@evaluations.command("calibration", cls=SettingsCommand)
@command((*LOCAL_FIELDS, *QUANTIZATION_DETAILS, "kernels"))
def eval_calibration(
    engine: EngineConfig,
    media: MediaConfig,
    per_task: Annotated[int, typer.Option(metavar="INT", min=2, help="Held-out images for each task.")] = 100,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot reliability: .svg or .html.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Store the fitted temperature with the model.")] = False,
) -> None:
    """Compare probabilities of decisions with known answers, and fit a temperature.

    Example: vlmserve eval calibration --plot reliability.svg
    """
    from vlmserve.cli.reliability import run_calibration

    run_calibration(engine, media, per_task, plot, write=write)


@evaluations.command("routing", cls=SettingsCommand)
@command((*LOCAL_FIELDS, *QUANTIZATION_DETAILS, "kernels", "max_lora_rank"))
def eval_routing(
    engine: EngineConfig,
    adapter: Annotated[str, typer.Argument(help="An X-LoRA checkpoint: local folder or Hugging Face id.")],
    question: Annotated[str, typer.Argument(help="The question.")],
    image: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="An image (repeatable).")] = None,
    tokens: Annotated[int, typer.Option(metavar="INT", min=1, help="Maximum tokens of the answer.")] = 64,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot the scalings of all tokens: .svg.")] = None,
) -> None:
    """Show how X-LoRA weighs adapters for each token of a question and its answer.

    Example: vlmserve eval routing my-adapter "What is this?" --image photo.jpg
    """
    from vlmserve.adapters.location import find_adapter
    from vlmserve.tools.routing import RoutingRecorder

    parts: list[dict[str, object]] = [{"type": "image", "image": str(path)} for path in image or ()]
    conversation = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
    routing = RoutingRecorder(engine, find_adapter(adapter)).route(conversation, tokens)
    typer.echo(routing.answer)
    typer.echo(routing.to_markdown())
    if plot is not None:
        plot.write_text(routing.to_svg(), "utf-8")
        typer.echo(f"Written: {plot}")


@evaluations.command("perplexity", cls=SettingsCommand)
@command(("revision", "device", "dtype", "kernels", "kv_cache_dtype", "num_threads", *QUANTIZATION_DETAILS))
def eval_perplexity(
    engine: EngineConfig,
    model: Annotated[str, typer.Argument(help="Short name, local folder or .gguf file, or Hugging Face id.")],
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            metavar="none|int8|int4", help="Quantization (repeatable; default: all); the first is the baseline."
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Text file (default: Python's manual).")] = None,
    tokens: Annotated[int, typer.Option(metavar="INT", min=2, help="Tokens of the text to use.")] = 32768,
    window: Annotated[int, typer.Option(metavar="INT", min=2, help="Context window in tokens.")] = 1024,
) -> None:
    """Measure perplexity on a text, and how quantization changes it.

    Example: vlmserve eval perplexity pixie --scheme none --scheme int4
    """
    from vlmserve.cli.perplexity import run_perplexity

    run_perplexity(engine, schemes(scheme), text, tokens, window)


@evaluations.command("quality", cls=SettingsCommand)
@command(("revision", "device", "dtype", "kernels", "num_threads"))
def eval_quality(
    engine: EngineConfig,
    models: Annotated[list[str], typer.Argument(help="Quantized models: local folders or Hugging Face ids.")],
    against: Annotated[str, typer.Option(metavar="MODEL", help="The unquantized model.")],
    tokens: Annotated[
        int, typer.Option(metavar="INT", min=2, help="Tokens to compare, image tokens included.")
    ] = 32768,
    conversations: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts with answers to compare on, as JSON lines.")
    ] = None,
    per_task: Annotated[
        int, typer.Option(metavar="INT", min=0, help="Questions to ask for each of pixie's tasks.")
    ] = 0,
    questions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Questions with known answers to ask, as JSON lines.")
    ] = None,
    speed: Annotated[
        int, typer.Option(metavar="INT", min=0, help="Speed measurements per model; medians are shown.")
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot KL divergence, memory and --speed: .svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what quantization costs: perplexity, KL divergence, agreement.

    Vision-language models are compared on answers about drawn images, language models on Python's manual.

    Example: vlmserve eval quality my-model --against qwen3-vl:2b
    """
    from vlmserve.cli.quality import run_quality

    run_quality(
        engine, models, against, tokens,
        conversations=conversations, per_task=per_task, questions=questions, turns=speed, plot=plot, as_json=as_json,
    )  # fmt: skip
