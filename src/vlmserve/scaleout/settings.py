"""Settings of a gateway."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vlmserve.config import Settings

PolicyName = Literal["affinity", "least-loaded", "round-robin"]


class GatewayConfig(Settings):
    """How a gateway treats requests."""

    policy: PolicyName = Field(
        "affinity",
        description="Which worker gets a request: the one that has its images and prompt cached, the least loaded one, "
        "or each in turn.",
    )
    max_in_flight: int = Field(10_000, ge=1, description="Requests under way at once; more are refused.")
    max_attempts: int = Field(
        3, ge=1, description="Workers that are tried for a request before anything of its answer has come."
    )
    max_digests: int = Field(
        2_000_000, ge=1000, description="Parts of prompts that are remembered for routing, over all workers."
    )
