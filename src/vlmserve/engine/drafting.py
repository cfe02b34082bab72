from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from vlmserve.engine.draft_costs import known_costs
from vlmserve.engine.loading import CacheSizes, may_draft
from vlmserve.kernels.trials import machine
from vlmserve.models.protocols import LoadedModel
from vlmserve.quant.memory import weight_bytes
from vlmserve.runner.runner import ModelRunner
from vlmserve.runner.warm_up import PREDICTED, ROWS_OF_DRAFTS, ROWS_OF_LAYER, time_ahead, time_layer, time_rows
from vlmserve.scheduler.drafts.costs import StepCosts
from vlmserve.scheduler.drafts.curve import Curve
from vlmserve.scheduler.drafts.drafter import Drafter
from vlmserve.scheduler.drafts.layer import LayerCosts
from vlmserve.scheduler.scheduler import Scheduler
from vlmserve.settings.config import EngineConfig

logger = logging.getLogger(__name__)


def start_drafting(
    config: EngineConfig,
    scheduler: Scheduler,
    runner: ModelRunner,
    sizes: CacheSizes,
    identity: bytes,
    *,
    overlaps: bool,
) -> Drafter | None:
    """Let a scheduler propose as many drafts as measurements justify. None: no drafts.

    identity: of the model and its settings. overlaps: steps without drafts are planned ahead.
    """
    if not may_draft(config, runner.model):
        return None
    most = min(config.max_num_batched_tokens, sizes.max_model_len, 1 + ROWS_OF_DRAFTS[-1])
    device = runner.model.device
    where = machine() if device.gpu_uuid is None else f"{machine()} {device.gpu_uuid}"
    key = f"{identity.hex()[:16]} {device.kernels} {runner.model.dtype} {most} {where}"
    measured = known_costs(key, partial(time_rows, runner, most))
    if len(measured) < 2:
        return None
    ahead = None
    if overlaps:
        ahead = known_costs(f"{key} ahead {config.max_num_seqs}", partial(time_ahead, runner, config.max_num_seqs))
    (_, one), (rows, longest) = (measured if ahead is None else ahead)[0], measured[-1]
    logger.info("Speculation: a step of %d tokens takes %.1f times as long as a step of one", rows, longest / one)
    layer = None
    if (model := runner.model).predictor is not None or model.assistant is not None:
        drafts_by = "" if model.assistant is None else f" of {model.assistant.identity.hex()[:16]}"
        seconds = [seconds for _, seconds in known_costs(f"{key}{drafts_by} layer", partial(time_layer, runner))]
        layer = layer_costs(seconds, share_of_layer(model))
        _log_layer(model, layer, one)
    drafter = Drafter(StepCosts(measured, ahead), layer, sizes.draft_places or config.max_num_seqs)
    scheduler.propose_drafts, scheduler.awaits_tokens = drafter.propose, False
    return drafter


def _log_layer(model: LoadedModel, layer: LayerCosts, step: float) -> None:
    """step: seconds of a step of one row."""
    steps = layer.draft / step
    if model.assistant is None:
        share = 100 * layer.rows.seconds(1) / step
        logger.info(
            "Speculation: the model's own layer (MTP) takes %.1f%% of a step, and a draft of it %.2f steps",
            share,
            steps,
        )
    elif steps < 1:
        logger.info("Speculation: a draft of the draft model takes %.2f steps", steps)
    else:
        logger.warning("Speculation: a draft of the draft model takes %.2f steps, so it never saves time", steps)


def share_of_layer(model: LoadedModel) -> float:
    """Return the bytes of weights that a draft reads, divided by the bytes of all the model's weights."""
    if model.assistant is not None:
        return model.assistant.read_bytes / model.weight_bytes
    layer = None if model.predictor is None else model.predictor.mtp
    return 0.0 if layer is None else weight_bytes(layer) / model.weight_bytes


def layer_costs(seconds: Sequence[float], share: float) -> LayerCosts:
    """Costs are differences of measured times, which noise can hide, so each is at least the layer's share of a step.

    seconds: of each step of `time_layer`. share: of the weights that the layer reads, see `share_of_layer`.
    """
    decode, with_layer, with_drafts, *prompts = seconds
    draft = max(share * decode, (with_drafts - with_layer) / PREDICTED)
    if not prompts:
        return LayerCosts(draft, Curve([(1, 0.0)]), has_context=True)
    prompt, prompt_with_layer = prompts
    of_one = max(share * decode, with_layer - decode)
    return LayerCosts(draft, Curve([(1, of_one), (ROWS_OF_LAYER, max(share * prompt, prompt_with_layer - prompt))]))
