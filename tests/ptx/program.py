"""PTX as text, made into instructions that the emulator executes.

Source: NVIDIA's "Parallel Thread Execution ISA". What Triton emits is understood, and nothing that it does not.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

LANES = 32

SPECIAL = (*(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"), "%laneid")
"""Registers that the emulator fills, in its order."""

IGNORED = re.compile(
    r"\.(approx|full|ftz|rn|uni|aligned|sync|weak|volatile|relaxed|cta|gpu|sys|satfinite|nc|L1::\w+|L2::\w+|m8n8|ptr)(?![\w:])"
)
"""Parts of an instruction's name that do not change what is executed here: rounding to nearest is the only one."""

NOTHING = (
    "fence", "membar", "prefetch", "griddepcontrol", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group",
    "bar.warp", "createpolicy", "setmaxnreg",
)  # fmt: skip
"""Instructions that change nothing here. Tensor cores have multiplied when their instruction ends."""

TOKEN = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


class UnknownInstruction(Exception):
    """What the emulator does not execute."""


@dataclass
class Instruction:
    """operation: the emulator's name of it. operands: places in a warp's registers, and numbers. line: of the text."""

    operation: str
    operands: list[int]
    line: int
    guard: int = -1
    inverted: bool = False


@dataclass
class Program:
    """A kernel. parameters: place and bytes of each, of so many bytes in all. registers: a warp's at first. special:
    places of `SPECIAL`, or -1. threads: of a program, in three directions."""

    name: str
    parameters: list[tuple[int, int]] = field(default_factory=list)
    parameter_bytes: int = 0
    threads: tuple[int, int, int] = (1, 1, 1)
    instructions: list[Instruction] = field(default_factory=list)
    registers: bytes = b""
    special: list[int] = field(default_factory=lambda: [-1] * len(SPECIAL))


def parse(text: str) -> Program:
    """The kernel of a module. Raises UnknownInstruction."""
    return _Parser(text).program


class _Parser:
    def __init__(self, text: str) -> None:
        entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", text, re.DOTALL)
        if entry is None:
            raise ValueError("there is no kernel in this text")
        self.program = Program(entry[1])
        self._symbols: dict[str, int] = {}
        self._add_parameters(entry[2])
        if threads := re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", entry[3]):
            x, y, z = (int(number or 1) for number in threads.groups())
            self.program.threads = (x, y, z)
        self._widths: dict[str, int] = {}
        self._families: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._constants: dict[tuple[int, int], int] = {}
        # Registers hold what nobody wrote: in floats NaN.
        self._image = bytearray()
        self._labels: dict[str, int] = {}
        self._jumps: list[tuple[Instruction, str]] = []
        self._line = text[: entry.end()].count("\n") + 1
        self._read(text[entry.end() :])
        for instruction, label in self._jumps:
            instruction.operands.append(self._labels[label])
        self.program.registers = bytes(self._image)

    def _add_parameters(self, text: str) -> None:
        for one in re.findall(r"\.param\s+([^,]+)", text):
            bits = int(re.search(r"\.[a-z]+(\d+)", one)[1])  # type: ignore[index]
            size = bits // 8
            place = -(-self.program.parameter_bytes // size) * size
            self._symbols[one.split()[-1]] = place
            self.program.parameters.append((place, size))
            self.program.parameter_bytes = place + size

    # Text.

    def _read(self, text: str) -> None:
        for line, statement in self._statements(text):
            self._line = line
            if match := re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement):
                self._declare(match[1], match[2])
            elif not statement.startswith("."):
                self._instruction(statement)

    def _statements(self, text: str) -> Iterator[tuple[int, str]]:
        """Statements to the end of the function, with their lines."""
        depth = 1
        for number, whole in enumerate(text.split("\n"), self._line):
            line = whole.split("//")[0].strip()
            while match := re.match(r"(\$?[\w$]+):\s*", line):
                self._labels[match[1]] = len(self.program.instructions)
                line = line[match.end() :]
            # A brace that stands alone begins or ends a block of inline assembly; others are of vectors.
            if line in ("{", "}") or re.match(r"[{}]\s*($|\.reg)", line):
                depth += 1 if line[0] == "{" else -1
                line = line[1:].strip()
                if depth == 0:
                    return
            if line.startswith((".loc", ".file", ".pragma")):
                continue
            for statement in line.split(";"):
                if statement := statement.strip():
                    yield number, statement

    def _declare(self, kind: str, names: str) -> None:
        width = 0 if kind == "pred" else int(kind[1:])
        for name in (one.strip() for one in names.split(",")):
            if match := re.fullmatch(r"([%\w]+?)<(\d+)>", name):
                family, count = match[1], int(match[2])
                if family.startswith("%"):
                    self._families[family] = width
                    continue
                declared = [f"{family}{number}" for number in range(count)]
            else:
                declared = [name]
            # A block of inline assembly has registers of its own.
            for one in declared:
                self._widths[one] = width
                self._places.pop(one, None)

    # Registers.

    def _width(self, name: str) -> int:
        if name in self._widths:
            return self._widths[name]
        if name in SPECIAL:
            return 32
        return self._families[name.rstrip("0123456789")]

    def _is_register(self, name: str) -> bool:
        return name.startswith("%") or name in self._widths

    def _register(self, name: str) -> int:
        if name not in self._places:
            self._places[name] = self._space(self._width(name))
            if name in SPECIAL:
                self.program.special[SPECIAL.index(name)] = self._places[name]
        return self._places[name]

    def _space(self, width: int) -> int:
        place = len(self._image)
        self._image.extend(b"\xff" * (4 if width == 0 else LANES * width // 8))
        # Predicates are bits of lanes: they keep others aligned.
        self._image.extend(b"\xff" * (-len(self._image) % 8))
        return place

    def _constant(self, value: int, width: int) -> int:
        """The place of a number in all lanes; of a predicate where the width is 0."""
        value &= (1 << (width or 32)) - 1
        if (value, width) not in self._constants:
            place = self._space(width)
            one = value.to_bytes((width or 32) // 8, "little")
            self._image[place : place + len(one) * (LANES if width else 1)] = one * (LANES if width else 1)
            self._constants[value, width] = place
        return self._constants[value, width]

    def _operand(self, text: str, width: int) -> int:
        """The place of a register, or of a number of this width."""
        if self._is_register(text):
            if self._width(text) != width:
                raise UnknownInstruction(f"line {self._line}: {text} has {self._width(text)} bits, not {width}")
            return self._register(text)
        if text == "global_smem":
            return self._constant(0, width)
        if width == 0:
            return self._constant(0xFFFFFFFF if _number(text) else 0, 0)
        return self._constant(_number(text), width)

    def _address(self, text: str, width: int) -> tuple[int, int]:
        """The place of an address, and what is added to it."""
        inner = text.strip("[] ")
        match = re.fullmatch(r"([%\w$]+)\s*(?:\+\s*(-?\w+))?", inner)
        if match is None:
            raise UnknownInstruction(f"line {self._line}: the address {text}")
        base, further = match[1], int(match[2] or "0", 0)
        if base.startswith("%"):
            place = self._register(base)
            if self._width(base) != width:
                wide = self._space(width)
                signs = f"cvt.u{width}.u{self._width(base)}"
                self.program.instructions.append(Instruction(signs, [wide, place], self._line))
                place = wide
            return place, further
        return self._constant(0 if base == "global_smem" else _number(base), width), further

    # Instructions.

    def _emit(self, operation: str, operands: list[int], guard: tuple[int, bool]) -> Instruction:
        instruction = Instruction(operation, operands, self._line, *guard)
        self.program.instructions.append(instruction)
        return instruction

    def _instruction(self, statement: str) -> None:
        guard = (-1, False)
        if match := re.match(r"@(!?)(%?\w+)\s+", statement):
            guard = (self._register(match[2]), bool(match[1]))
            statement = statement[match.end() :]
        whole, _, rest = statement.partition(" ") if " " in statement else statement.partition("\t")
        whole, rest = whole.strip(), rest.strip()
        operands = [one.strip() for one in TOKEN.findall(rest)]
        name = IGNORED.sub("", whole)
        kind = name.split(".")[0]
        if any(name == one or name.startswith(f"{one}.") for one in NOTHING):
            return
        handler = getattr(self, f"_{kind}", None)
        if handler is not None:
            handler(name, operands, guard)
            return
        # A result, and operands of one type.
        width = _bits(name)
        widths = [width] * len(operands)
        if kind in ("shl", "shr"):
            widths[2] = 32
        elif kind == "bfe":
            widths[2:] = [32, 32]
        elif name.startswith(("mul.wide", "mad.wide")):
            widths = [2 * width, width, width, 2 * width][: len(operands)]
        elif kind == "prmt":
            widths = [32] * 4
        elif kind in ("popc", "clz"):
            widths[0] = 32
        if name.startswith("bfe.b"):
            name = name.replace(".b", ".u")
        places = [self._operand(one, one_width) for one, one_width in zip(operands, widths, strict=True)]
        if name == "not.pred":
            places.append(places[1])
        self._emit(name, places, guard)

    def _abs(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        places = [self._operand(one, _bits(name)) for one in operands]
        if name.endswith("x2"):
            name = "and.b32"
            places.append(self._operand("0x7FFF7FFF", 32))
        self._emit(name, places, guard)

    def _mov(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        target, source = operands
        if target.startswith("{"):
            parts = _vector(target)
            places = [self._register(one) if one != "_" else self._space(_bits(name) // len(parts)) for one in parts]
            self._emit("unpack", [self._operand(source, _bits(name)), _bits(name) // 8, len(parts), *places], guard)
        elif source.startswith("{"):
            parts = _vector(source)
            places = [self._operand(one, _bits(name) // len(parts)) for one in parts]
            self._emit("pack", [self._register(target), _bits(name) // 8, len(parts), *places], guard)
        elif name == "mov.pred":
            place = self._operand(source, 0)
            self._emit("mov.pred", [self._register(target), place, place], guard)
        else:
            width = _bits(name)
            self._emit(f"mov.b{width}", [self._register(target), self._operand(source, width)], guard)

    def _setp(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        parts = name.split(".")
        joined = {"and": 1, "or": 2, "xor": 3}.get(parts[2], 0)
        relation = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(parts[1], parts[1])
        width = _bits(name)
        places = [self._register(operands[0]), *(self._operand(one, width) for one in operands[1:3]), joined]
        places.append(self._operand(operands[3], 0) if joined else 0)
        self._emit(f"setp.{relation}.{parts[-1]}", places, guard)

    def _selp(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        width = _bits(name)
        places = [self._operand(one, width) for one in operands[:3]]
        self._emit(f"selp.b{width}", [*places, self._operand(operands[3], 0)], guard)

    def _lop3(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        places = [self._operand(one, 32) for one in operands[:4]]
        self._emit("lop3.b32", [*places, _number(operands[4])], guard)

    def _cvt(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        parts = name.split(".")
        to, source = parts[-2:]
        modifiers = [one for one in parts[1:-2] if one != "rz" or to != "f32"]
        # Registers may be wider than what is read of them.
        width = self._width(operands[1]) if self._is_register(operands[1]) else _bits(source)
        place = self._operand(operands[1], width)
        if to in ("s8", "u8") and source[0] in "su":
            # The lowest byte, as its sign fills the register.
            place, source = self._lowest(to, place, width, guard)
            to = f"{to[0]}{self._width(operands[0])}"
        elif width != _bits(source) or width == 8:
            place, source = self._lowest(source, place, width, guard)
        if self._width(operands[0]) != _bits(to):
            raise UnknownInstruction(f"line {self._line}: {name} into {self._width(operands[0])} bits")
        places = [self._register(operands[0]), place]
        if to.endswith("x2"):
            places.append(self._operand(operands[2], 32))
        self._emit(".".join(["cvt", *modifiers, to, source]), places, guard)

    def _lowest(self, kind: str, place: int, width: int, guard: tuple[int, bool]) -> tuple[int, str]:
        """The lowest bits of registers of this width. Returns their place and type: of bytes become 32 bits."""
        of_bytes = _bits(kind) == 8
        bits = 32 if of_bytes else _bits(kind)
        narrow = self._space(bits)
        self._emit(f"lowest.{kind if of_bytes else f'u{bits}'}.{width}", [narrow, place], guard)
        return narrow, f"{kind[0]}{bits}"

    def _ld(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        parts = name.split(".")
        space, kind = parts[1], _raw(parts[-1])
        targets = _vector(operands[0])
        width = max(self._width(one) for one in targets if one != "_")
        if space == "param":
            place = self._symbols[operands[1].strip("[] ")]
            self._emit(f"ld.param.{kind}.{width}", [self._register(targets[0]), place], guard)
            return
        address, further = self._address(operands[1], 32 if space == "shared" else 64)
        places = [-1 if one == "_" else self._register(one) for one in targets]
        space = space.split("::")[0]
        self._emit(f"ld.{space}.{kind}.{width}", [address, further, len(places), *places], guard)

    def _st(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        parts = name.split(".")
        space, kind = parts[1].split("::")[0], "b" + parts[-1].strip("bsuf")
        address, further = self._address(operands[0], 32 if space == "shared" else 64)
        sources = _vector(operands[1])
        bits = _bits(kind)
        known = [self._width(one) for one in sources if self._is_register(one)]
        width = known[0] if known else max(16, bits)
        places = [self._operand(one, width) for one in sources]
        self._emit(f"st.{space}.{kind}.{width}", [address, further, len(places), *places], guard)

    def _cp(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        if name == "cp.async.commit_group":
            self._emit(name, [], guard)
        elif name.startswith("cp.async.wait"):
            self._emit("cp.async.wait_group", [_number(operands[0]) if operands else 0], guard)
        elif name.startswith(("cp.async.ca.shared.global", "cp.async.cg.shared.global")):
            target, source = self._address(operands[0], 32), self._address(operands[1], 64)
            taken = self._operand(operands[3], 32) if len(operands) > 3 else -1
            self._emit("cp.async", [*target, *source, _number(operands[2]), taken], guard)
        else:
            raise UnknownInstruction(f"line {self._line}: {name}")

    def _shfl(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        target, _, predicate = operands[0].partition("|")
        found = self._register(predicate) if predicate else -1
        places = [self._operand(one, 32) for one in operands[1:4]]
        self._emit(name.removesuffix(".b32"), [self._register(target), found, *places], guard)

    def _redux(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        self._emit(name, [self._register(operands[0]), self._operand(operands[1], 32)], guard)

    def _vote(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        self._emit(".".join(name.split(".")[:2]), [self._register(operands[0]), self._operand(operands[1], 0)], guard)

    def _ldmatrix(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        places = [self._register(one) for one in _vector(operands[0])]
        operation = "ldmatrix.trans" if ".trans" in name else "ldmatrix"
        self._emit(operation, [*self._address(operands[1], 32), len(places), *places], guard)

    def _stmatrix(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        places = [self._operand(one, 32) for one in _vector(operands[1])]
        operation = "stmatrix.trans" if ".trans" in name else "stmatrix"
        self._emit(operation, [*self._address(operands[0], 32), len(places), *places], guard)

    def _mma(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        parts = name.split(".")
        if "row.col" not in name:
            raise UnknownInstruction(f"line {self._line}: {name}")
        places = [self._operand(one, 32) for vector in operands for one in _vector(vector)]
        # Of the types of results, A, B and sums.
        self._emit(f"mma.{parts[1]}.{parts[-4]}.{parts[-3]}", places, guard)

    def _wgmma(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        # wgmma.mma_async.m64n32k16.f32.bf16.bf16 {results}, A, B, keeps, signs of A and B, transposed A and B
        parts = name.split(".")
        shape = re.fullmatch(r"m64n(\d+)k(\d+)", parts[2])
        if shape is None:
            raise UnknownInstruction(f"line {self._line}: {name}")
        results = [self._register(one) for one in _vector(operands[0])]
        in_registers = operands[1].startswith("{")
        a = [self._operand(one, 32 if in_registers else 64) for one in _vector(operands[1])]
        numbers = [_number(one) for one in operands[4:]]
        if len(numbers) == 3:  # A of registers is never transposed
            numbers.insert(2, 0)
        numbers += [1, 1, 0, 0][len(numbers) :]
        places = [int(shape[1]), *results, self._register("%tid.x"), int(in_registers), *a]
        places += [self._operand(operands[2], 64), self._operand(operands[3], 0), *numbers]
        self._emit(f"wgmma.k{shape[2]}.{parts[3]}.{parts[4]}", places, guard)

    def _bar(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        self._emit("bar", [], guard)

    _barrier = _bar

    def _ret(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        self._emit(name, [], guard)

    _exit = _trap = _ret

    def _bra(self, name: str, operands: list[str], guard: tuple[int, bool]) -> None:
        self._jumps.append((self._emit("bra", [], guard), operands[0]))


def _vector(text: str) -> list[str]:
    return [one.strip() for one in text.strip("{} ").split(",")]


def _bits(name: str) -> int:
    """Of the last type in a name: 0 for predicates."""
    last = name.split(".")[-1]
    if last == "pred":
        return 0
    if last.endswith("x2") or last == "tf32":
        return 32
    return int(last.lstrip("bsuf"))


def _raw(kind: str) -> str:
    """Without what a type means, but for signs."""
    return kind if kind[0] == "s" and kind != "s64" and kind != "s32" else "b" + kind.lstrip("bsuf")


def _number(text: str) -> int:
    """The bits of a number. Floats are written as 0f or 0d and hexadecimal digits."""
    if text.startswith(("0f", "0F", "0d", "0D")):
        return int(text[2:], 16)
    if "." in text:
        return int(struct.unpack("<I", struct.pack("<f", float(text)))[0])
    return int(text.rstrip("U"), 0)
