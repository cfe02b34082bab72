"""Starts drafting."""

from __future__ import annotations

import logging

from vlmserve.engine.loading import CacheSizes, may_draft
from vlmserve.runner.runner import ModelRunner
from vlmserve.runner.warm_up import time_rows
from vlmserve.scheduler.drafts.costs import StepCosts
from vlmserve.scheduler.drafts.drafter import Drafter
from vlmserve.scheduler.scheduler import Scheduler
from vlmserve.settings.config import EngineConfig

logger = logging.getLogger(__name__)


def start_drafting(
    config: EngineConfig, scheduler: Scheduler, runner: ModelRunner, sizes: CacheSizes
) -> Drafter | None:
    """Let a scheduler propose as many drafts as measurements justify. None: no drafts."""
    if not may_draft(config, runner.model):
        return None
    measured = time_rows(runner, min(config.max_num_batched_tokens, sizes.max_model_len))
    if len(measured) < 2:
        return None
    (_, one), (most, seconds) = measured[0], measured[-1]
    logger.info("Speculation: a step of %d tokens takes %.1f times as long as a step of one", most, seconds / one)
    drafter = Drafter(StepCosts(measured))
    scheduler.propose_drafts = drafter.propose
    return drafter
