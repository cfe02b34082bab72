"""What starts fast must not load what is slow."""

from __future__ import annotations

import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

SLOW = ("torch", "transformers", "starlette", "uvicorn", "numpy", "zmq", "PIL", "httpx", "sqlalchemy")


def loaded(code: str) -> set[str]:
    """The packages that a fresh interpreter has loaded after `code`."""
    return {name.partition(".")[0] for name in modules_after(code)}


def modules_after(code: str) -> list[str]:
    report = "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, timeout=60, check=True)
    return list(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["ask", "--help"], ["version"]])
def test_help_loads_nothing_slow(arguments):
    code = f"from vlmserve.cli import app\ntry:\n    app({arguments!r}, prog_name='vlmserve')\nexcept SystemExit: pass"
    assert not loaded(code) & set(SLOW)


def test_the_package_itself_loads_nothing():
    assert not loaded("import vlmserve") & {*SLOW, "pydantic", "msgspec"}


def test_sampling_parameters_come_without_torch():
    assert "torch" not in loaded("from vlmserve import SamplingParams; SamplingParams()")


def test_a_model_answers_without_torchs_compiler_and_transformers():
    """The compiler, which operations on the meta device need, comes with sympy and takes a second to import."""
    answer = "from vlmserve import LLM; LLM('pixie', kv_cache_memory='64MiB').chat([{'role': 'user', 'content': 'Hi'}])"
    modules = loaded(answer)
    assert "torch" in modules
    assert not modules & {"sympy", "transformers"}


FRONTEND = """
    vlmserve.layer_specs vlmserve.families.registry vlmserve.gguf.pair vlmserve.offline.llm vlmserve.frontend.requests
    vlmserve.frontend.client vlmserve.scaleout.app
""".split()


def test_the_frontend_does_not_load_torch():
    code = f"import importlib, sys\nfor name in {FRONTEND}:\n    importlib.import_module(name)"
    assert "torch" not in loaded(f"{code}\n    assert 'torch' not in sys.modules, name")


@pytest.mark.parametrize(("module", "most"), [("vlmserve.families.registry", 60), ("vlmserve.frontend.requests", 145)])
def test_the_frontend_loads_few_modules(module: str, most: int) -> None:
    """A family's module costs little, its tower and image processor are loaded when a checkpoint needs them."""
    own = [name for name in modules_after(f"import {module}") if name.startswith("vlmserve.")]
    assert 0 < len(own) <= most
    assert not {name for name in own if name.startswith("vlmserve.models.vision")}


def test_every_public_name_is_there():
    import vlmserve

    assert all(getattr(vlmserve, name) for name in vlmserve.__all__)
    with pytest.raises(AttributeError, match="Engines"):
        _ = vlmserve.Engines


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions and those for types alone count as well."""
    graph = grimp.build_graph("vlmserve", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
