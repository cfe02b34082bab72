"""``vlmserve cluster``, ``worker`` and ``gateway``: several engines behind one address."""

from __future__ import annotations

from types import ModuleType
from typing import Annotated

import typer

from vlmserve.cli.help import group
from vlmserve.cli.options import Models, Workers, command
from vlmserve.cli.serve import Model, are_several, listed_models
from vlmserve.cli.spellings import SettingsCommand
from vlmserve.errors import ConfigurationError
from vlmserve.scaleout.settings import GatewayConfig, ModelsConfig, WorkerKind
from vlmserve.settings.config import BUILT_IN_MODEL, EngineConfig, MediaConfig, ServerConfig

cluster = group(help="Run several engines behind one address.\n\nExample: vlmserve cluster up --workers 2")

COMMON_GATEWAY_FIELDS = (
    "host", "port", "api_key", "api_keys_file", "policy", "max_in_flight", "max_attempts", "storage_url",
    "shutdown_grace",
)  # fmt: skip
COMMON_WORKER_FIELDS = (
    "served_model_name", "device", "dtype", "quantize", "max_model_len", "max_num_seqs", "kv_cache_memory",
    "kv_cache_dtype", "memory_fraction", "storage_url", "shutdown_grace",
)  # fmt: skip

Address = Annotated[str, typer.Option(metavar="HOST:PORT", help="Ray cluster to join (auto: this machine's).")]


def worker_commands() -> ModuleType:
    try:
        from vlmserve.scaleout.ray import cluster
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigurationError("clusters need Ray; run: pip install 'vlmserve[ray]'") from None
    return cluster


@cluster.command("up", cls=SettingsCommand)
@command(common=("host", "port", "api_key", "api_keys_file", "policy", *COMMON_WORKER_FIELDS))
def up(
    engine: EngineConfig,
    media: MediaConfig,
    server: ServerConfig,
    gateway: GatewayConfig,
    described: Workers,
    offered: Models,
    model: Model = BUILT_IN_MODEL,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="INT", help="Number of engines (default: 2, or as --config says).")
    ] = None,
    gpus: Annotated[float, typer.Option(min=0, metavar="FLOAT", help="GPUs per engine.")] = 0.0,
) -> None:
    """Run several engines and a gateway on this machine; Ctrl-C stops all.

    The gateway has the API of `vlmserve serve`. `--config FILE` starts a worker for each section [worker.NAME].

    Example: vlmserve cluster up --workers 2 --port 8000
    """
    if described and workers is not None:
        raise ConfigurationError(
            f"--workers: the file of --config describes the workers, {', '.join(described)}; leave --workers out, or "
            "name one of them with --worker"
        )
    if offered and not described:
        raise ConfigurationError(
            f"the file of --config has [model.{next(iter(offered))}], but each worker of `cluster up` has one model: "
            "write [worker.NAME] sections, or run `vlmserve serve --config FILE`"
        )
    kinds = [WorkerKind(name, own["engine"], own["media"], own["server"], gpus=gpus) for name, own in described.items()]
    kinds = kinds or [WorkerKind("worker", engine, media, server, count=workers or 2, gpus=gpus)]
    worker_commands().up(kinds, server, gateway)


@command(common=(*COMMON_WORKER_FIELDS, "models_dir", "models_memory"))
def worker(
    engine: EngineConfig,
    media: MediaConfig,
    server: ServerConfig,
    models: ModelsConfig,
    described: Models,
    model: Model = BUILT_IN_MODEL,
    name: Annotated[str, typer.Option(help="Name of the worker, kept over restarts (default: from the machine).")] = "",
    address: Address = "auto",
) -> None:
    """Run an engine that joins a cluster; Ctrl-C lets it finish its answers and leave.

    The machine must belong to a Ray cluster (`ray start`). `--config FILE --worker NAME` reads the section
    [worker.NAME] of the file. With `--models-dir` or sections [model.NAME], it loads the models that gateways ask for.

    Example: vlmserve worker qwen3-vl:2b
    """
    if are_several(models, described):
        listed = listed_models(engine, media, server, models, described)
        worker_commands().join_as_host(listed, models, server, name=name, address=address)
        return
    worker_commands().join_as_worker(engine, media, server, name=name, address=address)


@command(common=COMMON_GATEWAY_FIELDS)
def gateway(
    server: ServerConfig,
    gateway: GatewayConfig,
    address: Address = "auto",
    take_over: Annotated[bool, typer.Option("--take-over", help="Replace the gateway that uses this port.")] = False,
) -> None:
    """Run a gateway to the workers of a cluster; several may run.

    The machine must belong to a Ray cluster (`ray start`). With `--take-over`, the running gateway on this port hands
    it over, finishes its answers and exits.

    Example: vlmserve gateway --port 8000
    """
    worker_commands().join_as_gateway(server, gateway, address=address, takes_over=take_over)
