from __future__ import annotations

from pathlib import Path

from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.sampling.grammar import GrammarCompiler
from vlmserve.sampling.schemas import JSONBounds
from vlmserve.settings.config import EngineConfig


def grammar_compiler(config: EngineConfig, folder: Path | None, vocab_size: int) -> GrammarCompiler:
    """Return a compiler for the configured checkpoint. The first grammar loads its tokenizer.

    folder: the checkpoint, if already resolved.
    """

    def read() -> Tokenizer:
        from vlmserve.models.hub import resolve_model

        return Tokenizer.from_folder(
            resolve_model(config.model, config.revision, config.mmproj) if folder is None else folder
        )

    return GrammarCompiler(
        read,
        vocab_size=vocab_size,
        max_bytes=config.max_grammar_bytes,
        cache_size=config.grammar_cache,
        cache_bytes=config.grammar_cache_memory,
        bounds=JSONBounds.of(config),
    )
