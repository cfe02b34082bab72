"""The check of sizes counts what it should; `make lint` runs it."""

from __future__ import annotations

from tests.ci_scripts import load

SIZES = load("sizes")
LONG_FUNCTION = "def long():\n" + "    x = 1\n" * 60


def methods(count: int) -> str:
    return "class Big:\n" + "".join(f"    def method{index}(self): ...\n" for index in range(count))


def test_long_files_functions_and_classes_are_counted() -> None:
    assert SIZES["excesses"]("server/a.py", "x = 1\n" * 501) == {"server/a.py: lines": 501}
    assert SIZES["excesses"]("server/a.py", LONG_FUNCTION) == {"server/a.py: lines of long": 61}
    assert SIZES["excesses"]("runner/a.py", methods(21)) == {"runner/a.py: methods of Big": 21}


def test_limits_themselves_are_allowed() -> None:
    text = "def short():\n" + "    x = 1\n" * 59 + methods(20)
    assert SIZES["excesses"]("runner/a.py", text) == {}
    assert SIZES["excesses"]("runner/a.py", "x = 1\n" * 500) == {}


def test_triton_kernels_and_classes_elsewhere_are_exempt() -> None:
    assert SIZES["excesses"]("kernels/triton/a.py", f"@triton.jit\n{LONG_FUNCTION}") == {}
    assert SIZES["excesses"]("media/a.py", methods(21)) == {}


def test_nested_functions_count_for_themselves() -> None:
    nested = "class Outer:\n" + "".join(f"    {line}\n" for line in LONG_FUNCTION.splitlines())
    assert SIZES["excesses"]("server/a.py", nested) == {"server/a.py: lines of Outer.long": 61}
