from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from vlmserve.settings.base import ByteSize, Settings
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig

PolicyName = Literal["affinity", "least-loaded", "round-robin"]


@dataclass(frozen=True)
class WorkerKind:
    """Workers of one machine with the same settings."""

    name: str
    """Prefix of the workers' names; a number follows."""
    engine: EngineConfig
    media: MediaConfig
    server: ServerConfig
    count: int = 1
    gpus: float = 0.0
    """GPUs of each worker; ignored on the CPU."""

    def ready(self, cores: int) -> WorkerKind:
        """Set 0 GPUs for workers on the CPU, and `cores` threads by default."""
        gpus = 0.0 if self.engine.device == "cpu" else self.gpus
        engine = self.engine
        if engine.num_threads is None and not gpus:
            engine = engine.model_copy(update={"num_threads": cores})
        return replace(self, engine=engine, gpus=gpus)


class GatewayConfig(Settings):
    """How a gateway treats requests."""

    policy: PolicyName = Field(
        "affinity",
        description="Which worker gets a request: the one that has its images and prompt cached, the least loaded one, "
        "or each in turn.",
    )
    max_in_flight: int = Field(10_000, ge=1, description="Maximum requests in flight; more get 429.")
    max_attempts: int = Field(3, ge=1, description="Maximum workers to try for a request.")
    max_digests: int = Field(
        2_000_000, ge=1000, description="Maximum prompt parts to remember for routing, over all workers."
    )


class ModelsConfig(Settings):
    """Several models in one server."""

    models_dir: str | None = Field(
        None, description="Folder whose subfolders and .gguf files are models; each loads on its first request."
    )
    models_memory: ByteSize | None = Field(
        None, description="Memory for all loaded models together, like 16GiB (default: 80% of the free memory)."
    )
    models_patience: float = Field(
        60.0,
        ge=0,
        description="Seconds that a request waits for memory before it stops requests to a busy model.",
    )
    models_load_timeout: float = Field(
        1800.0, gt=0, description="Maximum seconds of a load; then its process ends and waiting requests get 503."
    )
