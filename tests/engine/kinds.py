"""Chooses the kernels that run each test of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vlmserve.kernels.extension import supported_isas

Test = Callable[..., None]


def by_kernels(
    names: str, *, native: Sequence[Any], torch: Sequence[Any] = (), static: Sequence[Any] = ()
) -> Callable[[Test], Test]:
    """Parametrize a test with the fixture `kernels`, and with some values of `names` for each kind.

    The schedule does not depend on the kernels. So the native kernels, which are the fastest, run all values, and the
    others run those that reach code of their own. Where there are no native kernels, torch's run all values.
    """
    chosen = {"native": native, "torch": torch} if supported_isas() else {"torch": native}
    chosen["static"] = static
    cases = [_case(kind, value) for kind, values in chosen.items() for value in values]
    return _parametrized(f"kernels, {names}", cases)


def with_kernels(*kinds: str) -> Callable[[Test], Test]:
    """Parametrize a test with those kinds of kernels that this machine has."""
    return _parametrized("kernels", [kind for kind in kinds if supported_isas() or kind != "native"])


def _parametrized(names: str, cases: Sequence[Any]) -> Callable[[Test], Test]:
    def decorate(test: Test) -> Test:
        parametrized = pytest.mark.parametrize(names, cases, indirect=["kernels"])(test)
        return pytest.mark.usefixtures("kernels")(parametrized)

    return decorate


def _case(kind: str, value: Any) -> Any:
    """The parameters of one test: `value` is a `pytest.param`, a tuple of values, or one value."""
    if hasattr(value, "values") and hasattr(value, "marks"):
        return pytest.param(kind, *value.values, marks=value.marks, id=value.id and f"{kind}-{value.id}")
    return pytest.param(kind, *(value if isinstance(value, tuple) else (value,)))


with_budgets = by_kernels("budget", native=(9, 2048), torch=(30,))
"""Runs a test with budgets of tokens in a step: one cuts most prompts, one none, and one some."""
