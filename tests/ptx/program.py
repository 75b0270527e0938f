"""PTX text to a list of instructions.

PTX ISA, https://docs.nvidia.com/cuda/parallel-thread-execution; as far as one kernel without calls needs it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

WARP = 32  # threads
PARAMETERS_AT = 1 << 60  # where a kernel's arguments lie among all addresses
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.+)", re.S)
_VARIABLE = re.compile(r"\.(shared|global)\s+(?:\.align\s+(\d+)\s+)?\.\w(\d+)\s+([\w$]+)(?:\[(\d*)\])?")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.\w(\d+)\s+([\w$]+)(?:\[(\d+)\])?")
_LABEL = re.compile(r"([\w$]+):")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([\w.:]+)\s*(.*)", re.S)


@dataclass(frozen=True)
class Instruction:
    """One instruction: `op` with all its modifiers; operands as written, where names of an inner block are its own.

    `unless`: the predicate is negated.
    """

    op: str
    operands: tuple[str, ...]
    predicate: str | None = None
    unless: bool = False
    text: str = ""


@dataclass
class Program:
    """One kernel. Offsets and sizes in bytes; of `parameters` and `shared` where they begin and how long they are."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)  # bytes each; 0: a predicate
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    variables: dict[str, int] = field(default_factory=dict)  # of global memory: their sizes; all zeros
    dynamic: str | None = None  # the name of dynamic shared memory, which begins at `shared_bytes`
    shared_bytes: int = 0
    threads: int = 1024  # of a block, at most


def split(operands: str) -> tuple[str, ...]:
    """At commas outside of brackets."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(operands):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth:
            parts.append(operands[begin:at].strip())
            begin = at + 1
    parts.append(operands[begin:].strip())
    return tuple(p for p in parts if p)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def parse(text: str) -> Program:
    """The one kernel of `text`."""
    text = re.sub(r"//[^\n]*", "", text)
    head, _, rest = text.partition(".visible .entry")
    name, _, rest = rest.strip().partition("(")
    parameters, _, rest = rest.partition(")")
    body = rest[rest.index("{") + 1 : rest.rindex("}")]
    program = Program(name.strip())
    if most := re.search(r"\.maxntid (\d+)", rest.partition("{")[0]):
        program.threads = int(most[1])
    at = 0
    for align, bits, parameter, count in _PARAMETER.findall(parameters):
        size = SIZES[bits] * int(count or 1)
        at = _up(at, int(align or SIZES[bits]))
        program.parameters[parameter] = (at, size)
        at += size
    alignment = 16
    for line in head.split(";"):
        if found := _VARIABLE.search(line):
            assert "=" not in line, line
            space, align, bits, variable, count = found.groups()
            if space == "global":
                program.variables[variable] = SIZES[bits] * int(count or 1)
            else:
                program.dynamic, alignment = variable, int(align)
    _read(program, body)
    program.shared_bytes = _up(program.shared_bytes, alignment)
    return program


def _read(program: Program, body: str) -> None:
    scopes: list[dict[str, str]] = [{}]
    made = 0

    def named(word: str) -> str:
        return next((s[word] for s in reversed(scopes) if word in s), word)

    def renamed(operand: str) -> str:
        return re.sub(r"%?[A-Za-z_$][\w$.]*", lambda m: named(m[0]), operand)

    while body := body.lstrip():
        if body[0] == "{":
            made += 1
            inner = body[1 : _block_end(body)]
            scopes.append(
                {label: f"{label}#{made}" for label in re.findall(r"(?:^|[;{}])\s*([\w$]+):(?!:)", inner, re.M)}
            )
            body = body[1:]
        elif body[0] == "}":
            scopes.pop()
            body = body[1:]
        elif found := _LABEL.match(body):
            assert named(found[1]) not in program.labels, found[1]
            program.labels[named(found[1])] = len(program.instructions)
            body = body[found.end() :]
        else:
            statement, _, body = body.partition(";")
            statement = " ".join(statement.split())
            if found := _REGISTERS.match(statement):
                kind, names = found.groups()
                size = 0 if kind == "pred" else SIZES[re.sub(r"\D", "", kind)]
                for word in split(names):
                    if many := re.fullmatch(r"(%\w+)<(\d+)>", word):
                        program.registers |= {f"{many[1]}{i}": size for i in range(int(many[2]))}
                    else:
                        scopes[-1][word] = f"{word}#{made}"
                        program.registers[f"{word}#{made}"] = size
            elif found := _VARIABLE.match(statement):
                _, align, bits, variable, count = found.groups()
                begin, size = _up(program.shared_bytes, int(align or SIZES[bits])), SIZES[bits] * int(count or 1)
                program.shared[variable] = (begin, size)
                program.shared_bytes = begin + size
            elif not statement.startswith(".pragma"):
                found = _INSTRUCTION.fullmatch(statement)
                assert found, statement
                unless, predicate, op, operands = found.groups()
                program.instructions.append(
                    Instruction(
                        op,
                        tuple(
                            map(
                                renamed,
                                split(operands.replace("|", ",") if op.startswith(("shfl", "setp")) else operands),
                            )
                        ),
                        predicate and named(predicate),
                        bool(unless),
                        statement,
                    )
                )


def _block_end(body: str) -> int:
    """Where the block that `body` begins with is closed."""
    depth = 0
    for at, letter in enumerate(body):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return at
    raise ValueError("a block without an end")
