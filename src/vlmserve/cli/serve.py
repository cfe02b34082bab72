from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmserve.cli.fields import flag
from vlmserve.cli.options import Models, command
from vlmserve.errors import ConfigurationError
from vlmserve.scaleout.settings import ModelsConfig
from vlmserve.settings.config import BUILT_IN_MODEL, EngineConfig, MediaConfig, ServerConfig

if TYPE_CHECKING:
    from vlmserve.scaleout.ondemand.catalogue import Listed

COMMON_FIELDS = (
    "mmproj", "host", "port", "served_model_name", "api_key", "api_keys_file", "device", "tensor_parallel_size",
    "dtype", "quantize", "max_model_len", "max_num_seqs", "kv_cache_memory", "kv_cache_dtype", "memory_fraction",
    "chat_template", "max_images", "allowed_media_path", "log_prompts"
)  # fmt: skip
"""Flags that `vlmserve serve --help` shows."""

_OF_THE_SERVER = (
    "host", "port", "api_key", "api_keys_file", "protect_metrics", "cors_origins", "allowed_hosts", "allowed_origins",
)  # fmt: skip
"""Settings that hold for all models."""

Model = Annotated[str, typer.Argument(help=str(EngineConfig.model_fields["model"].description))]


@command(common=(*COMMON_FIELDS, "models_dir", "models_memory"))
def serve(
    engine: EngineConfig,
    media: MediaConfig,
    server: ServerConfig,
    models: ModelsConfig,
    described: Models,
    model: Model = BUILT_IN_MODEL,
) -> None:
    """Serve a model over an OpenAI-compatible API, or several that load on demand.

    Flags are also environment variables (VLMSERVE_MAX_MODEL_LEN) and keys of the file that --config names. vLLM's flags
    work too.

    Example: vlmserve serve qwen3-vl:2b --port 8001
    """
    if are_several(models, described):
        _serve_models(engine, media, server, models, described)
        return
    from vlmserve.server import run

    run.serve(engine, media, server)


def are_several(models: ModelsConfig, described: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether models load on demand. Raises ConfigurationError for settings of such models without any."""
    if described or models.models_dir is not None:
        return True
    if models.model_fields_set:
        names = " and ".join(flag(name) for name in sorted(models.model_fields_set))
        raise ConfigurationError(f"{names}: add --models-dir, or sections [model.NAME] to the settings file")
    return False


def _serve_models(
    engine: EngineConfig,
    media: MediaConfig,
    server: ServerConfig,
    models: ModelsConfig,
    described: Mapping[str, Mapping[str, Any]],
) -> None:
    from vlmserve.scaleout.ondemand.run import serve as serve_listed

    serve_listed(listed_models(engine, media, server, models, described), models, server)


def listed_models(
    engine: EngineConfig,
    media: MediaConfig,
    server: ServerConfig,
    models: ModelsConfig,
    described: Mapping[str, Mapping[str, Any]],
) -> list[Listed]:
    """The models of --models-dir and of sections [model.NAME]. described: those sections' settings.

    Raises ConfigurationError for a section without a model, and for a model that is named besides.
    """
    from vlmserve.scaleout.ondemand.catalogue import Listed, find_models

    if "model" in engine.model_fields_set:
        raise ConfigurationError(
            f"{engine.model}: there are several models; leave it out, and put it into --models-dir or [model.NAME]"
        )
    listed = [Listed(name, own["engine"], own["media"], own["server"]) for name, own in described.items()]
    for model in listed:
        if "model" not in model.engine.model_fields_set:
            raise ConfigurationError(f'[model.{model.name}] names no model; write model = "PATH or name" below it')
        for name in _OF_THE_SERVER:
            if getattr(model.server, name) != getattr(server, name):
                raise ConfigurationError(
                    f"[model.{model.name}] {name} would hold for all models; write it below [server]"
                )
    if models.models_dir is not None:
        listed += find_models(models.models_dir, engine, media, server)
    return listed
