"""No kernel writes a register that the tensor cores may still read, nor uses one that it has given away.

Hopper's wgmma reads its A operand from registers while the warp goes on, until a wait for its group. The assembler does
not always keep those registers: it may take them for something else before that wait, and results are wrong now and
then. This walks the control flow of the machine code instead of hoping for the timing that shows it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util
from pathlib import Path

import pytest
import torch

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import QuantScheme
from qtool.runtime.kernels.cuda import gemm, nvrtc
from qtool.runtime.kernels.cuda.driver import source
from qtool.runtime.kernels.cuda.gemm import EVEN, GemmConfig
from qtool.runtime.kernels.interface import LinearSpec

_NO_RESULT = re.compile(  # instructions that write no vector register
    r"(ST|STS|STG|STSM|STL|BAR|BRA|EXIT|SYNCS|UTM\w+|MEMBAR|DEPBAR|R2UR|U[A-Z]+\d*|ISETP|FSETP|PLOP3|NOP|CCTL|RED|ERRBAR|"
    r"WARPSYNC|BSSY|BSYNC|BREAK|R2P|ACQBULK|PREEXIT)$"
)
_MOST_GROUPS = 3  # under way at once; no kernel leaves more


@dataclass(frozen=True)
class Instruction:
    """`operand`: registers of A that a matrix product reads, or none; `ends`: whether it ends its group; `pending`:
    groups that may still be under way after a wait; `written`: registers; `highest`: register named; `left`: registers
    that a warp keeps from here on; `after`: instructions that may follow."""

    text: str
    highest: int
    left: int | None
    operand: frozenset[int]
    ends: bool
    pending: int | None
    written: frozenset[int]
    after: tuple[int, ...]


def _written(operation: str, arguments: list[str]) -> frozenset[int]:
    if _NO_RESULT.match(operation.split(".")[0]):
        return frozenset()
    for argument in arguments[:3]:  # predicates may come first
        found = re.match(r"R(\d+)(\.\w+)?$", argument)
        if found:
            parts = operation.split(".")
            matrices = next((int(p) for p in parts if p in ("2", "4")), 1) if parts[0] == "LDSM" else 1
            wide = "WIDE" in parts or "64" in parts or (parts[0] == "CS2R" and "32" not in parts)
            size = 4 if "128" in parts else 2 if wide else matrices
            return frozenset(range(int(found[1]), int(found[1]) + size))
        if not re.match(r"!?U?P(\d+|T)$", argument):
            break
    return frozenset()


def instructions(listing: str) -> list[Instruction]:
    """Those of nvdisasm's listing of one kernel."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in map(str.strip, listing.splitlines()):
        if label := re.match(r"(\.L\w+|\$\S+):", line):
            labels[label[1]] = len(lines)
        elif code := re.match(r"/\*[0-9a-f]{4,6}\*/\s*(.*?);", line):
            lines.append(code[1].strip())
    found = []
    for number, text in enumerate(lines):
        conditional = text.startswith("@")
        bare = re.sub(r"^@!?U?P\d+\s+", "", text)
        operation, _, rest = bare.partition(" ")
        arguments = [a.strip() for a in rest.split(",")] if rest else []
        following = [number + 1] if number + 1 < len(lines) else []
        if operation.startswith("BRA"):
            target = re.search(r"`\((\.L\w+)\)", rest)
            conditional |= len(arguments) > 1 or "P" in rest.split("`")[0]
            following = [labels[target[1]], *(following if conditional else [])] if target else following
        elif operation.startswith("CALL"):  # and back
            following = [labels[rest.split("`(")[1].split(")")[0]], *following]
        elif operation.startswith("BRX"):
            following = [labels[name] for name in re.findall(r"\.L\w+", rest)]
        elif operation.startswith(("EXIT", "RET")) and not conditional:
            following = []
        wide = 4 if ".128" in bare else 2 if re.search(r"\.(64|WIDE)\b", bare) else 1
        left = re.search(r"USETMAXREG\.DEALLOC\S* 0x([0-9a-f]+)", bare)
        matrix = operation.startswith(("HGMMA", "IGMMA"))
        first = re.match(r"R(\d+)", arguments[1]) if matrix else None
        wait = operation == "WARPGROUP.DEPBAR.LE"
        found.append(
            Instruction(
                text=text,
                highest=max((int(r) + wide - 1 for r in re.findall(r"\bR(\d+)\b", bare)), default=-1),
                left=int(left[1], 16) if left else None,
                operand=frozenset(range(int(first[1]), int(first[1]) + 4)) if first else frozenset(),
                ends=matrix and "gsb0" in rest,
                pending=int(arguments[-1], 16) if wait else None,
                written=frozenset() if matrix or wait else _written(operation, arguments),
                after=tuple(following),
            )
        )
    return found


def overwritten(listing: str) -> list[str]:
    """The instructions that write a register which a matrix product under way may read."""
    code = instructions(listing)
    State = tuple[frozenset[int], tuple[frozenset[int], ...]]
    seen: set[tuple[int, State]] = set()
    work: list[tuple[int, State]] = [(0, (frozenset(), ()))]
    faults: dict[int, str] = {}
    while work:
        at, (group, groups) = work.pop()
        if (at, (group, groups)) in seen:
            continue
        seen.add((at, (group, groups)))
        here = code[at]
        if here.written & group.union(*groups):
            faults[at] = here.text
        group |= here.operand
        if here.ends:
            group, groups = frozenset(), (*groups, group)[-_MOST_GROUPS:]
        if here.pending is not None:
            groups = groups[-here.pending :] if here.pending else ()
        work += [(following, (group, groups)) for following in here.after]
    return [faults[at] for at in sorted(faults)]


def given_away(listing: str) -> list[str]:
    """The instructions that name a register which their warp has left to others."""
    code = instructions(listing)
    work = [(following, here.left) for here in code if here.left is not None for following in here.after]
    seen: set[tuple[int, int]] = set()
    while work:
        at, left = work.pop()
        if (at, left) not in seen:
            seen.add((at, left))
            work += [(following, left) for following in code[at].after]
    return [code[at].text for at, left in sorted(seen) if code[at].highest >= left]


LOOP = """
.L_x_1:
        /*0010*/                   IGMMA.64x64x32.S8.S8 R24, R4, gdesc[UR8], R24, gsb0 ;
        /*0020*/                   {load} ;
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{pending} ;
        /*0040*/                   {copy} ;
        /*0050*/              @!P0 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
"""


def test_what_is_written_while_it_is_read_is_found() -> None:
    def faults(load: str, pending: int, copy: str) -> list[str]:
        return overwritten(LOOP.format(load=load, pending=pending, copy=copy))

    assert faults("LDSM.16.M88.4 R12, [R57]", 0, "MOV R4, R12") == []
    assert faults("LDSM.16.M88.4 R12, [R57]", 1, "MOV R5, R12") == ["MOV R5, R12"]
    assert faults("LDSM.16.M88.4 R1, [R57]", 0, "MOV R4, R12") == ["LDSM.16.M88.4 R1, [R57]"]
    assert faults("LDS.128 R8, [R57]", 0, "MOV R4, R12") == []
    assert faults("LDS.64 R6, [R57]", 0, "MOV R4, R12") == ["LDS.64 R6, [R57]"]
    assert faults("LDSM.16.M88.2 R3, [R57]", 0, "MOV R4, R12") == ["LDSM.16.M88.2 R3, [R57]"]
    assert faults("CS2R R2, SRZ", 0, "MOV R4, R12") == []
    assert faults("CS2R R6, SRZ", 0, "MOV R4, R12") == ["CS2R R6, SRZ"]
    assert faults("ISETP.GE.AND P1, PT, R4, R5, PT", 0, "MOV R7, R4") == []
    assert faults("IADD3 R9, P1, R4, R5, RZ", 1, "MOV R10, R4") == []


def test_a_wait_for_all_but_one_group_leaves_the_last_one_under_way() -> None:
    two = """
        /*0010*/                   HGMMA.64x64x16.F32 R24, R4, gdesc[UR8], R24, gsb0 ;
        /*0020*/                   HGMMA.64x64x16.F32 R24, R8, gdesc[UR8], R24 ;
        /*0030*/                   HGMMA.64x64x16.F32 R24, R12, gdesc[UR8], R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   MOV R{register}, RZ ;
        /*0060*/                   EXIT ;
    """
    found = {register: bool(overwritten(two.format(register=register))) for register in (4, 7, 8, 11, 12, 15, 16)}
    assert found == {4: False, 7: False, 8: True, 11: True, 12: True, 15: True, 16: False}


def test_registers_that_were_given_away_are_found() -> None:
    branches = """
        /*0010*/                   @P0 BRA `(.L_x_1) ;
        /*0020*/                   USETMAXREG.DEALLOC.CTAPOOL 0x20 ;
        /*0030*/                   CALL.REL.NOINC `($__internal_0_$div) ;
        /*0040*/                   BRX R2 -0x10 (*"BRANCH_TARGETS .L_x_2,.L_x_3"*) ;
.L_x_1:
        /*0050*/                   MOV R99, RZ ;
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/                   MOV R31, RZ ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   {wide} ;
        /*00a0*/                   EXIT ;
$__internal_0_$div:
        /*00b0*/                   {divide} ;
        /*00c0*/                   RET.REL.NODEC R2 `(gemm) ;
        /*00d0*/                   MOV R98, RZ ;
    """
    for wide, divide, found in (
        ("LDS.128 R28, [R2]", "MOV R4, R5", []),
        ("LDS.128 R32, [R2]", "MOV R4, R5", ["LDS.128 R32, [R2]"]),
        ("IMAD.WIDE R31, R2, R3, R4", "MOV R4, R5", ["IMAD.WIDE R31, R2, R3, R4"]),
        ("MOV R4, R5", "@!P1 MOV R4, R40", ["@!P1 MOV R4, R40"]),
    ):
        assert given_away(branches.format(wide=wide, divide=divide)) == found


def _disassembler() -> str | None:
    """nvdisasm: on the path, of the package nvidia-cuda-nvdisasm, or Triton's own."""
    for package, pattern in (("nvidia", "*/bin/nvdisasm"), ("triton", "backends/nvidia/bin/nvdisasm")):
        spec = util.find_spec(package)
        for root in [] if spec is None else list(spec.submodule_search_locations or []):
            for path in Path(root).glob(pattern):
                return str(path)
    return shutil.which("nvdisasm")


def _can_compile() -> bool:
    try:
        nvrtc.library()
    except QtoolError:
        return False
    return _disassembler() is not None


def _products() -> Iterator[tuple[str, GemmConfig]]:
    """Each scheme in every other cut."""
    for i, name in enumerate(
        ("w8a8", "w8g128a8", "w4a8-asym", "w4g128a8", "w4g64a8-asym", "w4g128", "w4g64-asym", "w8")
    ):
        spec = LinearSpec(4096, 4096, QuantScheme.parse(name), dtype=torch.float16)
        configs = (
            GemmConfig(32, 3),
            GemmConfig(64, 3, 2),
            GemmConfig(64, 4),
            GemmConfig(128, 4),
            GemmConfig(144, 2, EVEN),
            GemmConfig(256, 2),
            GemmConfig(256, 2, progressive=True),
            GemmConfig(192, 3, progressive=True),
        )
        yield from ((name, config) for config in configs[i % 2 :: 2] if gemm.fits(spec, config))


@pytest.mark.skipif(not _can_compile(), reason="NVRTC or nvdisasm is not on this machine")
@pytest.mark.parametrize(("name", "config"), list(_products()), ids=str)
def test_products_leave_what_the_tensor_cores_read(
    name: str, config: GemmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path))
    spec = LinearSpec(4096, 4096, QuantScheme.parse(name), dtype=torch.float16)
    image = nvrtc.compile_cuda(source("gemm.cu"), "sm_90a", gemm.macros(spec, torch.float16, config), name="gemm")
    file = tmp_path / "gemm.cubin"
    file.write_bytes(image)
    disassembler = _disassembler()
    assert disassembler is not None
    listing = subprocess.run([disassembler, "-c", file], capture_output=True, text=True, check=True).stdout
    code = instructions(listing)
    assert sum(bool(i.operand) for i in code) >= 4
    assert overwritten(listing) == []
    assert [i.left for i in code if i.left is not None] == [40 if config.warpgroups == 2 else 32]
    assert given_away(listing) == []
