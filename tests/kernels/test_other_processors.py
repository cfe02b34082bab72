"""The native kernels for processors other than this machine's, in `native/main.cpp`, which compares them with float64.

Arm's run in an emulator. Those with AVX-512 and AVX-VNNI are compiled with C++ in place of the instructions that AVX2
does not have (`native/emulated_x86.h`); the compiler also reads them as they are.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.built import FOLDER
from vlmserve.kernels.extension import COMPILE_HERE, missing_isas, supported_isas

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "vlmserve" / "kernels" / "csrc"
MAIN = Path(__file__).parent / "native" / "main.cpp"
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
ARM_ISAS = ("neon_bf16", "neon_dot", "neon")
X86_ISAS = ("amx", "avx512_bf16", "avx512", "avx2_vnni")
"""avx512_vnni has no line that the first two do not have between them."""
PRODUCTS_ONLY = ("neon_dot", "avx2_vnni")
"""Only their products by bytes differ from the kernels of "neon" and of "avx2"."""
EMULATED_ISAS = [
    isa
    for isa in ("avx2_vnni", *(("avx512_bf16", "avx512_vnni") if os.environ.get("VLMSERVE_ISAS") == "all" else ()))
    if isa not in supported_isas()
]
"""Other tests run the instruction sets that this machine has. Those with vectors of 16 floats take minutes to compile
without AVX-512."""
EMULATED = MAIN.with_name("emulated_x86.h")
PRODUCTS = MAIN.with_name("products_only.cpp")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """What setup.py compiles the kernels with."""
    setuptools = pytest.importorskip("setuptools")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **_: None)
        patch.delenv("VLMSERVE_SANITIZE", raising=False)
        return runpy.run_path(str(ROOT / "setup.py"))


def build(
    compiler: str,
    folder: Path,
    flags: list[str],
    isas: dict[str, list[str]],
    link: Sequence[str] = (),
    reference: Sequence[str] = (),
) -> Path:
    """The program for some instruction sets, each with its own flags.

    Builds it once for each version of the sources, the compiler and its commands. folder: for object files. reference:
    flags for the float64 that kernels are compared with.
    """
    # Optimized less than what is installed: that takes a seventh of the time.
    common = [compiler, *flags, "-Og", "-pthread", f"-I{SOURCES}", "-c"]
    sources = {isa: PRODUCTS if isa in PRODUCTS_ONLY else SOURCES / "kernels.cpp" for isa in isas}
    commands = {isa: [*common, *own, f"-DVLMSERVE_ISA={isa}", str(sources[isa])] for isa, own in isas.items()}
    commands["threads"] = [*common, str(SOURCES / "threads.cpp")]
    commands["main"] = [*common, *reference, *(f"-DVLMSERVE_WITH_{isa}" for isa in isas), str(MAIN)]
    version = hashlib.sha256(repr((run([compiler, "--version"]), commands, link)).encode())
    for source in sorted([*SOURCES.iterdir(), *MAIN.parent.iterdir()]):
        version.update(source.name.encode() + source.read_bytes())
    program = FOLDER / f"native-{version.hexdigest()[:16]}"
    if program.exists():
        return program

    def compiled(name: str) -> str:
        target = str(folder / f"{name}.o")
        run([*commands[name], "-o", target])
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, commands))
    run([compiler, *objects, "-pthread", *link, "-o", str(folder / "compare")])
    FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.move(folder / "compare", program.with_suffix(f".{os.getpid()}"))
    program.with_suffix(f".{os.getpid()}").rename(program)
    return program


def run(command: list[str]) -> str:
    # A sanitizer that is loaded into the tests has no place in the compiler or the emulator.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    wrong = [line for line in done.stdout.splitlines() if not line.startswith("ok ")]
    assert done.returncode == 0, "\n".join((f"{command[0]}: exit code {done.returncode}", *wrong, done.stderr[-4000:]))
    return done.stdout


def compare(command: list[str]) -> None:
    lines = run(command).splitlines()
    assert lines[-1] == "0 cases failed"
    assert len(lines) > 100


@pytest.fixture(scope="module")
def arm_program(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool, package in ((ARM_COMPILER, "g++-aarch64-linux-gnu"), (ARM_EMULATOR, "qemu-user")):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed (Debian: apt-get install {package})")
    isas = settings["MACHINES"]["aarch64"]
    assert tuple(isas) == ARM_ISAS
    folder = tmp_path_factory.mktemp("aarch64")
    # The emulator takes most of its time for the reference.
    return build(ARM_COMPILER, folder, settings["FLAGS"], isas, link=("-static",), reference=("-O2",))


@pytest.mark.parametrize("isa", ARM_ISAS)
def test_kernels_for_arm_are_those_of_float64(isa: str, arm_program: Path) -> None:
    compare([ARM_EMULATOR, "-cpu", "max", str(arm_program), isa])


@pytest.mark.parametrize(
    ("processor", "isas"), [("max", ARM_ISAS), ("cortex-a76", ("neon_dot", "neon")), ("cortex-a72", ("neon",))]
)
def test_arm_processors_get_what_they_can_run(processor: str, isas: tuple[str, ...], arm_program: Path) -> None:
    assert tuple(run([ARM_EMULATOR, "-cpu", processor, str(arm_program)]).split()) == isas


@pytest.fixture(scope="module")
def x86_program(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    if not is_x86 or not shutil.which("g++") or "avx2" not in settings["here"](["g++"]):
        pytest.skip("this processor has no AVX2, or g++ is not installed")

    def emulated(flag: str) -> str:
        return flag.replace("-mavx", "-DEMULATE_avx") if flag.startswith(("-mavx512", "-mavxvnni")) else flag

    isas = {isa: [*map(emulated, settings["MACHINES"]["x86_64"][isa]), f"-include{EMULATED}"] for isa in EMULATED_ISAS}
    tables = ",".join(f"&kernels_{isa}" for isa in EMULATED_ISAS)
    flags = [*settings["FLAGS"], f"-DVLMSERVE_EMULATED={tables}"]
    return build("g++", tmp_path_factory.mktemp("x86"), flags, isas)


@pytest.mark.parametrize("isa", EMULATED_ISAS)
def test_emulated_kernels_for_x86_are_those_of_float64(isa: str, x86_program: Path) -> None:
    compare([str(x86_program), isa])


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the compiler is one for another processor")
@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
@pytest.mark.parametrize("isa", X86_ISAS)
def test_what_is_not_compiled_here_is_correct_cpp(isa: str, settings: dict[str, Any]) -> None:
    """Tests compile what their processor runs, so that nothing else would read the rest."""
    flags = [*settings["FLAGS"], *settings["MACHINES"]["x86_64"][isa]]
    # Sanitizers reject more: what they add makes integers of constants.
    checked = ["-Wall", "-Werror", "-fsanitize=address,undefined", "-fsyntax-only", str(SOURCES / "kernels.cpp")]
    run(["g++", *flags, f"-DVLMSERVE_ISA={isa}", *checked])


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="all are compiled for Arm")
def test_tests_run_all_instruction_sets_of_this_processor(settings: dict[str, Any]) -> None:
    if not supported_isas():
        pytest.skip("the native kernels were not built: no C++ compiler")
    here = settings["here"](["gcc" if shutil.which("gcc") else "cc"])
    # One that is too new for the compiler is left out.
    missing = [isa for isa in missing_isas() if isa in here]
    assert not missing, f"{', '.join(missing)} were not compiled; {COMPILE_HERE}"
    assert here == list(supported_isas())
    assert settings["here"](["no-such-compiler"]) == list(settings["ISAS"])


@pytest.fixture
def command(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A build of the portable kernels in a folder of its own, which compiles nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").symlink_to(ROOT / "src")
    monkeypatch.setenv("VLMSERVE_ISAS", [*settings["ISAS"]][-1])
    command = settings["BuildKernels"](pytest.importorskip("setuptools").Distribution())
    command.build_temp, command.get_ext_fullpath = "build", lambda name: name
    return command


def compiler_of(command: list[str], compiled: Callable[[], None]) -> SimpleNamespace:
    """compiled: called whenever kernels are compiled."""

    def compile_sources(sources: list[str], output_dir: str, **options: Any) -> list[str]:
        if "kernels.cpp" in sources[0]:
            compiled()
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        return [f"{output_dir}/object.o"]

    return SimpleNamespace(
        compiler_cxx=command[:1],
        compiler_so_cxx=command,
        compile=compile_sources,
        link_shared_object=lambda *_, **__: None,
    )


def test_machines_without_compiler_can_install(settings: dict[str, Any], command: Any) -> None:
    command.compiler = compiler_of(["no-such-compiler"], lambda: None)
    # Not another error: the extension is optional.
    with pytest.raises(settings["CompileError"], match="no-such-compiler"):
        command.build_extension(SimpleNamespace(name="native"))


def test_other_compilers_and_flags_compile_again(command: Any, tmp_path: Path) -> None:
    compiled: list[None] = []
    other = tmp_path / "other"
    other.symlink_to(sys.executable)
    counts = []
    for compiler in ([sys.executable], [sys.executable], [sys.executable, "-O"], [str(other), "-O"]):
        command.compiler = compiler_of(compiler, lambda: compiled.append(None))
        command.build_extension(SimpleNamespace(name="native"))
        counts.append(len(compiled))
    assert counts == [1, 1, 2, 3]


def test_builds_of_a_folder_wait(settings: dict[str, Any], command: Any) -> None:
    refused: list[BaseException] = []

    def compiled() -> None:
        with (settings["KEPT"] / "lock").open() as file, pytest.raises(BlockingIOError) as caught:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused.append(caught.value)

    command.compiler = compiler_of([sys.executable], compiled)
    command.build_extension(SimpleNamespace(name="native"))
    assert refused
    with (settings["KEPT"] / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="all are compiled for Arm")
def test_first_builds_compile_two_instruction_sets(settings: dict[str, Any]) -> None:
    compiler = ["gcc" if shutil.which("gcc") else "cc"]
    here, chosen = settings["here"](compiler), settings["wanted_isas"]
    assert chosen("best", compiler) == [here[0], "portable"]
    assert chosen("here", compiler) == [here[0], "portable", *here[1:-1]]
    assert sorted(chosen("all", compiler)) == sorted(settings["ISAS"])
    assert chosen("avx2,portable", compiler) == ["avx2", "portable"]
    with pytest.raises(SystemExit, match="use best, here, all or some of amx"):
        chosen("avx3", compiler)
