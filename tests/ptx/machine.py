"""A kernel's run: every thread of a grid, in numpy, until all have ended.

Threads that are at the same instruction run it together. Of those that can go on, the ones furthest behind are next, so
that threads which parted meet again; or, with a seed, any. What a program may not rely on comes at the worst time that
its rules allow: copies to shared memory land when nothing else can go on (with a seed: at any time), what products of a
warpgroup read may not change until they are waited for, shared memory begins as NaN, and every access is checked. An
instruction that is not known here is refused (NotImplementedError), never passed over.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ptx.accesses import ACCESSES
from ptx.copies import COPIES, Barrier, make_barrier
from ptx.instructions import OPERATIONS, Make, Run
from ptx.memory import FaultError, GlobalMemory, SharedMemory, Words
from ptx.program import PARAMETERS_AT, WARP, Instruction, Program
from ptx.warps import TOGETHER

Order = int | Literal["first", "last"] | None
_READY, _WAITING, _ENDED = range(3)
# Memory is visible at once, and caches are not there.
_WITHOUT_EFFECT = ("griddepcontrol.launch_dependents", "fence", "prefetch", "membar")
_MOST_YIELDS = 10_000  # of threads that look at memory again and again, while nothing else happens
# In a run with a seed, the chance that
_LANDS = 0.1  # a copy lands after a turn,
_ALONE = 0.3  # a warp goes on without others that are at the same place.


@dataclass
class Meeting:
    """Threads of a block at one of its barriers (bar.sync)."""

    arrived: int = 0
    waiting: list[Words] = field(default_factory=list)
    waited: bool = False  # one of those for the kernels before this one


class Machine:
    """One launch.

    Args:
        program: the kernel.
        memory: all that it may access.
        arguments: the bytes of its parameters.
        grid, threads: blocks (x, y, z); threads of each, a multiple of 32.
        dynamic: bytes of shared memory beside what the program asks for.
        cluster: blocks of a cluster (x, y, z).
        variables: addresses of the program's own global memory.
        early: which bytes kernels before this one may still write when it begins, by where they begin; until a thread
            has waited for those kernels it may not read them, nor store anything. None: it begins after them.
        order: None, the usual one; "first", "last": that warp of those that can go on, as far as it goes; or a seed.
    """

    def __init__(
        self,
        program: Program,
        memory: GlobalMemory,
        arguments: bytes,
        *,
        grid: tuple[int, int, int],
        threads: int,
        dynamic: int = 0,
        cluster: tuple[int, int, int] = (1, 1, 1),
        variables: dict[str, int] | None = None,
        early: Sequence[tuple[int, Words]] | None = None,
        order: Order = None,
    ) -> None:
        assert threads % WARP == 0
        blocks = grid[0] * grid[1] * grid[2]
        self.program, self.memory, self.arguments = program, memory, arguments
        self.threads, self.count = threads, blocks * threads
        self.shared = SharedMemory(blocks, program.shared_bytes + dynamic)
        self.block = np.repeat(np.arange(blocks), threads)  # of each thread
        self.barriers: dict[tuple[int, int], Barrier] = {}  # by block and address
        self.copies: list[Callable[[], None]] = []  # under way
        self.products: dict[int, list[list[Callable[[], None]]]] = defaultdict(lambda: [[]])  # by warp and group
        self._variables = variables or {}
        self._early = early or ()
        self._waited = np.full(self.count, early is None)  # for the kernels before this one
        self._order, self._rng = order, np.random.default_rng(order) if isinstance(order, int) else None
        self._registers: dict[str, Words] = {}
        self._pc = np.zeros(self.count, np.int64)
        self._state = np.zeros(self.count, np.int8)
        self._held = np.zeros(self.count, bool)  # cannot go on before others have
        self._meetings: dict[tuple[int, int], Meeting] = defaultdict(Meeting)
        self._arrivals = np.zeros(self.count, np.int64)  # of a thread at barriers of its cluster
        self._yields = 0
        self._place(grid, cluster)
        self._code = [self._compile(i) for i in program.instructions]
        self._leader = np.ones(len(self._code) + 1, bool)  # where threads may join or leave others
        for i in range(1, len(self._code)):
            self._leader[i] = self._code[i][1] or self._code[i - 1][1]
        self._leader[list(program.labels.values())] = True

    def _place(self, grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> None:
        (gx, gy, gz), (cx, cy, cz) = grid, cluster
        assert gx % cx == gy % cy == gz % cz == 0
        number = np.arange(gx * gy * gz)
        x, y, z = number % gx, number // gx % gy, number // gx // gy
        rank = x % cx + y % cy * cx + z % cz * cx * cy
        self.cluster_of = x // cx + y // cy * gx + z // cz * gx * gy  # of each block
        self.block_by_rank = {(int(c), int(r)): int(b) for b, c, r in zip(number, self.cluster_of, rank)}
        thread = np.tile(np.arange(self.threads), len(number))
        special = {"%tid.x": thread, "%tid.y": 0 * thread, "%tid.z": 0 * thread, "%laneid": thread % WARP}
        special |= {"%ctaid.x": x[self.block], "%ctaid.y": y[self.block], "%ctaid.z": z[self.block]}
        special |= {f"%nctaid.{d}": np.full(self.count, n) for d, n in zip("xyz", grid)}
        special |= {"%ntid.x": np.full(self.count, self.threads), "%cluster_ctarank": rank[self.block]}
        self._special = {name: value.astype(np.uint32) for name, value in special.items()}

    # ---- operands ----------------------------------------------------------------------------------------------------

    def register(self, name: str) -> Words:
        """Its bits for every thread."""
        if name not in self._registers:
            size = self.program.registers[name]
            self._registers[name] = np.zeros(self.count, f"u{size}" if size else bool)
        return self._registers[name]

    def constant(self, text: str) -> int | None:
        """An immediate's bits or a symbol's address; None for a register."""
        if text in self.program.registers or text in self._special:
            return None
        if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
            return int(found[1] or found[2], 16)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return int(text.rstrip("U"), 0)
        if text in self.program.shared:
            return self.program.shared[text][0]
        if text == self.program.dynamic:
            return self.program.shared_bytes
        if text in self.program.parameters:
            return PARAMETERS_AT + self.program.parameters[text][0]
        if text in self._variables:
            return self._variables[text]
        raise NotImplementedError(f"operand {text}")

    def reader(self, text: str, kind: np.dtype[Any] | type | str) -> Run:
        """Of threads idx → the operand as numbers of `kind`, one of each or one for all. `!` before a predicate."""
        kind = np.dtype(kind)
        if text.startswith("!"):
            inner = self.reader(text[1:], bool)
            return lambda idx: ~inner(idx)
        bits = self.constant(text)
        if bits is not None:
            unsigned = np.dtype(f"u{kind.itemsize}")
            fixed = np.array([bits & (1 << 8 * unsigned.itemsize) - 1], unsigned).view(kind)
            return lambda idx: fixed
        array = self._special[text] if text in self._special else self.register(text)
        if array.dtype == bool or array.dtype.itemsize == kind.itemsize:
            view = array.view(kind)
            return lambda idx: view[idx]
        part = np.dtype(f"u{kind.itemsize}")  # the low part of a wider register; a narrower one behind zeros
        return lambda idx: array[idx].astype(part).view(kind)

    def writer(self, text: str) -> Callable[[Words, Words], None]:
        """(idx, numbers): sets a register of these threads; narrower numbers are extended, by their sign if signed."""
        if text == "_":
            return lambda idx, value: None
        array = self.register(text)

        def write(idx: Words, value: Words) -> None:
            if array.dtype == bool:
                array[idx] = value
            elif value.dtype.itemsize == array.dtype.itemsize:
                array[idx] = value.view(array.dtype)
            else:
                array[idx] = value.astype(f"{value.dtype.kind}{array.dtype.itemsize}").view(array.dtype)

        return write

    def address(self, text: str) -> Run:
        """Of threads idx → the address in brackets: uint64 [n]."""
        base, _, offset = text.strip("[]").partition("+")
        size = self.program.registers[base] if self.constant(base) is None else 8
        read = self.reader(base, f"u{size}")
        more = np.uint64(int(offset or "0", 0) & (1 << 64) - 1)
        return lambda idx: np.broadcast_to(read(idx).astype(np.uint64) + more, len(idx))

    @staticmethod
    def vector(text: str) -> list[str]:
        """The operands within braces, or the one."""
        return [part.strip() for part in text.strip("{}").split(",")]

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises FaultError as a device would, and where all threads wait for each other."""
        with np.errstate(all="ignore"):
            while np.any(self._state != _ENDED):
                self._turn()
        if self.copies or any(barrier.bytes for barrier in self.barriers.values()):
            raise FaultError("the kernel ended before its copies had landed")
        if any(group for groups in self.products.values() for group in groups):
            raise FaultError("the kernel ended before its products were waited for")

    def _turn(self) -> None:
        able = np.flatnonzero((self._state == _READY) & ~self._held)
        if len(able):
            if isinstance(self._order, str):  # one warp as far as it goes
                able = able[able // WARP == able[0 if self._order == "first" else -1] // WARP]
            places = self._pc[able]
            chosen = places.min() if self._rng is None else self._rng.choice(np.unique(places))
            group = able[places == chosen]
            if self._rng is not None and self._rng.random() < _ALONE:
                group = group[group // WARP == group[self._rng.integers(len(group))] // WARP]
            self._run_from(int(chosen), group)
            if self._rng is not None and self.copies and self._rng.random() < _LANDS:
                self._land()
        elif self.copies:
            self._land()
        elif self._yields and self._yields < _MOST_YIELDS:
            self._held[:] = False  # those that look at memory again and again look once more
        else:
            self._stop()

    def _land(self) -> None:
        self.copies.pop(0 if self._rng is None else int(self._rng.integers(len(self.copies))))()
        self._held[:] = False

    def _stop(self) -> None:
        left = np.flatnonzero(self._state != _ENDED)
        lines = [f"all {len(left)} threads that are left wait:"]
        for pc in np.unique(self._pc[left]):
            here = left[self._pc[left] == pc]
            blocks, warps = np.unique(self.block[here]), np.unique(here % self.threads // WARP)
            lines.append(f"  {self.program.instructions[pc].text}: blocks {blocks[:8]}, warps {warps}")
        raise FaultError("\n".join(lines))

    def _run_from(self, pc: int, idx: Words) -> None:
        """Run threads idx, all at `pc`, to where others may join or leave them."""
        run, moves = self._code[pc]
        if moves:
            if run(idx):
                self._held[:] = False
            return
        while True:
            run(idx)
            pc += 1
            if self._leader[pc]:
                break
            run, _ = self._code[pc]
        self._pc[idx] = pc
        self._held[:] = False

    def go_on(self, idx: Words) -> None:
        self._pc[idx] += 1

    def hold(self, idx: Words) -> None:
        """Let threads try again once others have gone on."""
        self._held[idx] = True

    def sleep(self, idx: Words) -> None:
        """Until they are woken."""
        self._state[idx] = _WAITING

    def wake(self, threads: list[Words]) -> None:
        for idx in threads:
            self._state[idx] = _READY

    def _compile(self, instruction: Instruction) -> tuple[Run, bool]:
        """(what runs it for threads idx, whether it moves them itself: then it returns whether any went on)."""
        op = instruction.op
        kind = op.split(".")[0]
        if op in _CONTROL:
            return _CONTROL[op](self, instruction), True
        if kind in ("bar", "barrier") and op != "bar.warp.sync":
            raise NotImplementedError(instruction.text)
        if kind in TOGETHER:
            assert instruction.predicate is None, instruction.text
            return self._whole_warps(TOGETHER[kind](self, instruction), moves=False), True
        if kind == "mbarrier":
            run = make_barrier(self, instruction)
            if ".try_wait" in op:
                return run, True
        elif op.startswith(_WITHOUT_EFFECT):
            return lambda idx: None, False
        elif op == "griddepcontrol.wait":
            run = self._wait_for_kernels
        elif kind in _MAKES:
            run = _MAKES[kind](self, instruction)
        else:
            raise NotImplementedError(instruction.text)
        if ".acquire." in op:  # it may be looked at again and again, until another thread has stored to it
            return self._yielding(run), True
        return (run, False) if instruction.predicate is None else (self._where_it_holds(instruction, run), False)

    def _condition(self, instruction: Instruction) -> Run:
        assert instruction.predicate is not None
        return self.reader("!" * instruction.unless + instruction.predicate, bool)

    def _where_it_holds(self, instruction: Instruction, run: Run) -> Run:
        holds = self._condition(instruction)

        def some(idx: Words) -> None:
            chosen = idx[holds(idx)]
            if len(chosen):
                run(chosen)

        return some

    def _yielding(self, run: Run) -> Run:
        def look(idx: Words) -> bool:
            run(idx)
            self.go_on(idx)
            self.hold(idx)
            self._yields += 1
            return False

        return look

    def _wait_for_kernels(self, idx: Words) -> None:
        self._waited[idx] = True

    def have_waited(self, idx: Words) -> bool:
        """Whether any of threads idx has waited for the kernels before this one."""
        return bool(self._waited[idx].any())

    def follow(self, idx: Words, waited: bool) -> None:
        """Who passes a barrier comes after all that its other threads did before it."""
        self._waited[idx] |= waited

    def check_alive(self, block: int) -> None:
        """Raises FaultError where another block's shared memory may be gone."""
        if np.all(self._state[self.block == block] == _ENDED):
            raise FaultError("the shared memory of a block that has ended is used")

    def check_read(self, idx: Words, addresses: Words, size: int) -> None:
        """Raises FaultError where threads idx read from global memory too early."""
        hasty = ~self._waited[idx]
        if not hasty.any():
            return
        for begin, stored in self._early:
            at = (addresses[hasty] - np.uint64(begin)).astype(np.int64)
            at = at[(at >= 0) & (at < len(stored))]
            if any(stored[i : i + size].any() for i in at.tolist()):
                raise FaultError("memory is read before the kernel that writes it was waited for")

    def check_store(self, idx: Words) -> None:
        """Raises FaultError where threads idx store to global memory too early."""
        if not self._waited[idx].all():
            raise FaultError("memory is written before the kernels that may read it were waited for")

    # ---- control -----------------------------------------------------------------------------------------------------

    def _branch(self, instruction: Instruction) -> Run:
        target = self.program.labels[instruction.operands[0]]
        holds: Run = (lambda idx: True) if instruction.predicate is None else self._condition(instruction)

        def branch(idx: Words) -> bool:
            self._pc[idx] = np.where(holds(idx), target, self._pc[idx] + 1)
            return True

        return branch

    def _leave(self, instruction: Instruction) -> Run:
        assert instruction.predicate is None, instruction.text

        def leave(idx: Words) -> bool:
            self._state[idx] = _ENDED
            return True

        return leave

    def _block_barrier(self, instruction: Instruction) -> Run:
        """bar.sync and bar.arrive."""
        assert instruction.predicate is None, instruction.text
        number, *wanted = (self.reader(o, np.uint32) for o in instruction.operands)
        waits = instruction.op == "bar.sync"

        def arrive(idx: Words) -> bool:
            numbers = np.broadcast_to(number(idx), len(idx))
            counts = np.broadcast_to(wanted[0](idx) if wanted else self.threads, len(idx))
            for at in range(0, len(idx), WARP):
                if numbers[at] > 15:
                    raise FaultError(f"barrier {numbers[at]} of 16")
                meeting = self._meetings[int(self.block[idx[at]]), int(numbers[at])]
                self._meet(meeting, idx[at : at + WARP], int(counts[at]), waits)
            return True

        return self._whole_warps(arrive, moves=True)

    def _meet(self, meeting: Meeting, idx: Words, wanted: int, waits: bool) -> None:
        meeting.arrived += len(idx)
        meeting.waited |= self.have_waited(idx)
        if meeting.arrived > wanted:
            raise FaultError(f"{meeting.arrived} threads at a barrier of {wanted}")
        if waits:
            meeting.waiting.append(idx)
            self.sleep(idx)
        else:
            self.go_on(idx)
        if meeting.arrived == wanted:
            for threads in meeting.waiting:
                self.go_on(threads)
                self.follow(threads, meeting.waited)
            self.wake(meeting.waiting)
            meeting.arrived, meeting.waiting, meeting.waited = 0, [], False

    def _cluster_barrier(self, instruction: Instruction) -> Run:
        def arrive(idx: Words) -> None:
            self._arrivals[idx] += 1

        def wait(idx: Words) -> bool:
            cluster = self.cluster_of[self.block]
            there = self._state != _ENDED
            late = {int(c): self._arrivals[there & (cluster == c)].min() for c in np.unique(cluster[idx])}
            met = np.array([late[int(c)] for c in cluster[idx]]) >= self._arrivals[idx]
            for c in np.unique(cluster[idx[met]]):
                self.follow(idx[met & (cluster[idx] == c)], self.have_waited(np.flatnonzero(cluster == c)))
            self.go_on(idx[met])
            self.hold(idx[~met])
            return bool(met.any())

        assert instruction.predicate is None, instruction.text
        if ".arrive" in instruction.op:
            return self._whole_warps(arrive, moves=False)
        return self._whole_warps(wait, moves=True)

    def _whole_warps(self, run: Run, *, moves: bool) -> Run:
        """`run` for the warps of which all lanes are there; the others wait for theirs."""

        def together(idx: Words) -> bool:
            _, lanes = np.unique(idx // WARP, return_counts=True)
            whole = np.repeat(lanes == WARP, lanes)
            self.hold(idx[~whole])
            idx = idx[whole]
            if not len(idx):
                return False
            if moves:
                return bool(run(idx))
            run(idx)
            self.go_on(idx)
            return True

        return together


_MAKES: dict[str, Make] = OPERATIONS | ACCESSES | COPIES
_CONTROL: dict[str, Callable[[Machine, Instruction], Run]] = {
    "bra": Machine._branch,
    "bra.uni": Machine._branch,
    "ret": Machine._leave,
    "bar.sync": Machine._block_barrier,
    "bar.arrive": Machine._block_barrier,
    "barrier.cluster.arrive.relaxed.aligned": Machine._cluster_barrier,
    "barrier.cluster.arrive.release.aligned": Machine._cluster_barrier,
    "barrier.cluster.wait.acquire.aligned": Machine._cluster_barrier,
    "barrier.cluster.wait.aligned": Machine._cluster_barrier,
}
