"""The emulator of tests/ptx: numbers against torch, and what a device would not forgive is found."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from ptx.device import HOPPER, emulated
from ptx.machine import Machine, Order
from ptx.memory import FaultError, GlobalMemory
from ptx.numbers import bf16_bits
from ptx.program import parse

from qtool.quant.errors import QtoolError
from qtool.runtime.kernels.cuda import nvrtc


def _missing() -> str | None:
    try:
        nvrtc.library()
    except QtoolError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(_missing() is not None, reason=_missing() or "")
THREADS = 64
EXACT = np.arange(THREADS, dtype=np.float32) + 1


def run(
    body: str, x: np.ndarray, *, order: Order = None, dynamic: int = 0, overlap: bool = False, blocks: int = 1
) -> np.ndarray:
    """What 64 threads leave in y, of the size of x, by `body`; `overlap`: a kernel before it may still write x[0];
    `blocks`: of a cluster."""
    text = f'extern "C" __global__ void kernel(const float* x, float* y) {{ const int i = threadIdx.x; {body} }}'
    program = parse(nvrtc.compile_ptx(text, "compute_90a", {}, name="kernel"))
    y, memory = np.full_like(x, np.nan), GlobalMemory()
    for array in (x, y):
        memory.add(array.ctypes.data, array.nbytes)
    arguments = np.array([x.ctypes.data, y.ctypes.data], np.uint64).tobytes()
    early = [(x.ctypes.data, np.arange(x.nbytes) < 4)] if overlap else None
    shape = {"grid": (blocks, 1, 1), "cluster": (blocks, 1, 1), "threads": THREADS, "dynamic": dynamic}
    Machine(program, memory, arguments, early=early, order=order, **shape).run()
    return y


def test_bfloat16_is_torchs() -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=torch.Generator().manual_seed(0)).int()
    x = torch.cat((bits, (bits & -65536) | 0x8000)).view(torch.float32)  # half of them half-way between two
    x = x[~x.isnan()]
    assert np.array_equal(bf16_bits(x.numpy()), x.bfloat16().view(torch.int16).numpy().view(np.uint16))
    halfway = np.float64(1) + 2.0**-8  # of two neighbours; a little more is nearer to the upper one
    assert bf16_bits(np.array([halfway, halfway + 2.0**-40])).tolist() == [0x3F80, 0x3F81]


def test_rounding_of_packed_halves_is_torchs() -> None:
    """Results that are subnormal, and products whose first rounding would mislead a second."""
    x = np.float32([1.0 + 2.0**-10, 2.0**-13, -3.0, 65504.0] * 16)
    body = """
      unsigned a, b, c;
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(a) : "f"(x[i]), "f"(x[i ^ 1]));
      asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(b) : "r"(a), "r"(0x0c010c01u));
      asm("fma.rn.f16x2 %0, %1, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
      y[i] = __uint_as_float(c);
    """
    half = torch.from_numpy(x).half().view(-1, 2)
    small = half * torch.tensor([0x0C01], dtype=torch.int16).view(torch.float16)
    want = (half.double() * half.double() + small.double()).half()  # exact before the rounding
    got = torch.from_numpy(run(body, x).view(np.float16)).view(-1, 2, 2)
    assert torch.equal(got[:, 1].flip(-1), want.flip(-1))
    assert torch.equal(got[:, 0], want.flip(-1))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y[i + 1] = x[i];", "no memory at|beyond the end"),
        ("y[i] = x[i - 1 - (i == 0) * 1000000];", "no memory at|beyond the end"),
        ("float2 v = ((const float2*)(x + 1))[i / 4]; y[i] = v.x + v.y;", "an access of 8 bytes"),
        ("__shared__ float s[32]; s[i] = x[i]; __syncthreads(); y[i] = s[i / 2];", "bytes of shared memory"),
        (
            "if (i < 32) __syncthreads(); else if (x[i] > 0) { __syncthreads(); __syncthreads(); } y[i] = 0;",
            "left wait",
        ),
        ("__shared__ float s[64]; s[i] = x[i]; __syncthreads(); y[i] = ((volatile float*)s)[i - 1];", "bytes at -4"),
        ('asm volatile("bar.arrive 1, 32;"); y[i] = 0;', None),
        (
            'asm volatile("bar.sync 1, 96;"); y[i] = 0;',
            r"all 64 threads that are left wait:\n  bar.sync 1, 96: blocks \[0\], warps \[0 1\]",
        ),
    ],
)
def test_faults(body: str, reason: str | None) -> None:
    if reason is None:
        run(body, EXACT.copy())
        return
    with pytest.raises(FaultError, match=reason):
        run(body, EXACT.copy())


def test_a_barrier_that_is_missing_shows_in_some_order() -> None:
    def handed_on(barrier: str, order: Order) -> bool:
        body = f"__shared__ float s[64]; s[i] = x[i]; {barrier} y[i] = s[i ^ 32];"
        return np.array_equal(run(body, EXACT.copy(), order=order), EXACT.reshape(2, 32)[::-1].reshape(-1))

    assert all(handed_on("__syncthreads();", order) for order in (None, "first", "last", *range(10)))
    assert not handed_on("", "first")
    assert not handed_on("", "last")
    assert not all(handed_on("", order) for order in range(10))


COPY = """
  extern __shared__ __align__(128) float s[];
  __shared__ unsigned long long barrier;
  const unsigned at = (unsigned)__cvta_generic_to_shared(&barrier), to = (unsigned)__cvta_generic_to_shared(s);
  if (i == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;" ::"r"(at) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];"
                 ::"r"(to), "l"(x), "r"(at) : "memory");
  }
  __syncthreads();
"""
WAIT = """
  asm volatile("{\\n.reg .pred p;\\nagain:\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\\n@!p bra again;\\n}"
               ::"r"(at) : "memory");
"""


def test_a_copy_has_landed_once_it_was_waited_for_and_not_before() -> None:
    assert np.array_equal(run(COPY + WAIT + "y[i] = s[i];", EXACT.copy(), dynamic=256), EXACT)
    with pytest.raises(FaultError, match="read while a copy to it is under way"):
        run(COPY + "y[i] = s[i];" + WAIT, EXACT.copy(), dynamic=256)
    with pytest.raises(FaultError, match="was overwritten"):
        run(COPY + WAIT + "barrier = i;" + WAIT + "y[i] = 0;", EXACT.copy(), dynamic=256)
    once = WAIT.replace("@!p bra again;", "")
    with pytest.raises(FaultError, match="read while a copy to it is under way"):
        run(COPY + once + "y[i] = s[i];", EXACT.copy(), dynamic=256)
    with pytest.raises(FaultError, match="before its copies had landed"):
        run(COPY + "y[i] = 0;", EXACT.copy(), dynamic=256)


SEND = """
  extern __shared__ __align__(128) float s[];
  __shared__ unsigned long long barrier;
  const unsigned at = (unsigned)__cvta_generic_to_shared(&barrier), to = (unsigned)__cvta_generic_to_shared(s);
  if (i == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(at) : "memory");
  }
  MEET
  unsigned there, signal;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(to + 16 * i), "r"(1 - blockIdx.x));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(signal) : "r"(at), "r"(1 - blockIdx.x));
  const unsigned v = __float_as_uint(blockIdx.x ? x[i] : 0.f);
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %1, %1, %1}, [%2];"
               ::"r"(there), "r"(v), "r"(signal) : "memory");
"""
MEET = """asm volatile("barrier.cluster.arrive.relaxed.aligned;\\n barrier.cluster.wait.aligned;" ::: "memory");"""


@pytest.mark.parametrize("order", [None, "first", "last", 1, 2])
def test_what_a_block_sends_another_has_come_once_it_was_waited_for(order: Order) -> None:
    send, once = SEND.replace("MEET", MEET), "if (!blockIdx.x) y[i] = s[4 * i + 3];"
    assert np.array_equal(run(send + WAIT + once, EXACT.copy(), order=order, dynamic=1024, blocks=2), EXACT)
    with pytest.raises(FaultError, match="read while a copy to it is under way"):
        run(send + MEET + once + WAIT, EXACT.copy(), dynamic=1024, blocks=2)
    with pytest.raises(FaultError, match="of a block that has ended is used"):
        run(send.replace("const unsigned v", "if (!blockIdx.x) return;\nconst unsigned v"), EXACT.copy(), order="first",
            dynamic=1024, blocks=2)  # fmt: skip


def test_a_block_sends_to_no_barrier_that_is_not_there_yet() -> None:
    with pytest.raises(FaultError, match="no barrier"):
        run(SEND.replace("MEET", "") + WAIT, EXACT.copy(), order="first", dynamic=1024, blocks=2)


def test_launches_before_hopper_have_no_clusters_and_less_shared_memory() -> None:
    text = 'extern "C" __global__ void __launch_bounds__(32) kernel(float* y) { y[threadIdx.x] = 1.f; }'
    y = torch.zeros(32)
    with mock.patch("qtool.runtime.kernels.cuda.driver.source", return_value=text):
        for capability, most in (((8, 9), 99), ((8, 0), 163), (HOPPER, 227)):
            with emulated(capability) as device:
                kernel = device.load(0, "kernel.cu", "kernel", (), 1 << 20, False)
                kernel.launch((1, 1, 1), 32, (y,), shared_bytes=most * 1024)
                with pytest.raises(FaultError, match="bytes of shared memory"):
                    kernel.launch((1, 1, 1), 32, (y,), shared_bytes=most * 1024 + 1)
                for what in ({"cluster": (1, 1, 1)}, {"overlap": True}):
                    if capability < HOPPER:
                        with pytest.raises(FaultError, match="came with Hopper"):
                            kernel.launch((1, 1, 1), 32, (y,), **what)
    assert bool((y == 1).all())


AWAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"const float v = x[i]; {AWAIT} y[i] = v;", "is read before"),
        (f"const float v = i ? ((volatile const float*)x)[i] : 1; {AWAIT} y[i] = v;", None),
        (f"y[i] = 1; {AWAIT}", "is written before"),
        (f"if (i < 32) {{ {AWAIT} }} y[i] = x[i];", "is written before"),
        (f"if (i < 32) {{ {AWAIT} }} __syncthreads(); y[i] = x[i];", None),  # the others come after it, by the barrier
    ],
)
def test_what_kernels_before_may_still_write_is_left_alone(body: str, reason: str | None) -> None:
    if reason is None:
        assert np.array_equal(run(body, EXACT.copy(), overlap=True), EXACT)
        return
    with pytest.raises(FaultError, match=reason):
        run(body, EXACT.copy(), overlap=True)


def test_threads_that_parted_meet_again() -> None:
    body = "float v = 0; for (int k = 0; k <= i % 5; k++) v += x[i]; y[i] = __shfl_xor_sync(~0u, v, 1);"
    each = EXACT * (np.arange(THREADS) % 5 + 1)
    for order in (None, 0, 1, "first", "last"):
        assert np.array_equal(run(body, EXACT.copy(), order=order), each.reshape(-1, 2)[:, ::-1].reshape(-1))
