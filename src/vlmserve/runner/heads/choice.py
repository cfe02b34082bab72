from __future__ import annotations

from vlmserve.models.output_layers import OutputLayers
from vlmserve.runner.heads.head import Head
from vlmserve.runner.heads.pooling import EmbedHead
from vlmserve.runner.heads.prefill import PrefillHead
from vlmserve.runner.heads.scores import BranchHead, ScoreHead
from vlmserve.tasks import Embed, Generate, Prefill, Score, ScoreBranch, Task


def head_of(task: Task, num_tokens: int, layers: OutputLayers | None = None) -> Head | None:
    """None: it samples tokens. num_tokens: of the prompt."""
    match task:
        case Generate():
            return None
        case Prefill():
            return PrefillHead(task, num_tokens)
        case Embed():
            return EmbedHead(task, num_tokens, layers)
        case Score():
            return ScoreHead(task, num_tokens)
        case ScoreBranch():
            return BranchHead(task, num_tokens)
