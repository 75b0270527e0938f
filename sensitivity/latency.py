"""What each scheme of each group costs in time on this device, from the measured table of its kernels."""

from __future__ import annotations

import torch

from qtool.quant.progress import ProgressFn, silent
from qtool.runtime.kernels.measure import LinearCase, kernel_times
from qtool.sensitivity.allocate import Latency
from qtool.sensitivity.record import GroupSensitivity, Sensitivity


def group_case(sensitivity: Sensitivity, group: GroupSensitivity, scheme: str, tokens: int) -> LinearCase:
    """The product that the runtime makes of a group: its members fused, rows one below another."""
    rows = sum(sensitivity.shapes[m][0] for m in group.members)
    return LinearCase(rows, sensitivity.shapes[group.members[0]][1], scheme, tokens)


def group_latency(
    sensitivity: Sensitivity, device: torch.device, *, tokens: int = 1, progress: ProgressFn = silent
) -> Latency:
    """Milliseconds of every group under every measured scheme (and 16 bits), `tokens` sequences in one decode step.

    Reads this device's table of kernel times; what it lacks is measured and kept. Activations are bfloat16.
    """
    schemes = {g.name: dict.fromkeys(["fp16", *g.damage]) for g in sensitivity.groups}
    cases = {(g.name, s): group_case(sensitivity, g, s, tokens) for g in sensitivity.groups for s in schemes[g.name]}
    times = kernel_times(cases.values(), device, progress=progress)
    return {
        g.name: {s: times[cases[g.name, s]].microseconds / 1e3 for s in schemes[g.name]} for g in sensitivity.groups
    }
