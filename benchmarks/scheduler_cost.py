"""What the scheduler costs the host in one step: `python benchmarks/scheduler_cost.py`.

Scheduling a step and entering its results, without a model, in microseconds of process time: decodes of N requests that
all run, in the steady state (blocks are allocated and published as they fill). The fastest of several rounds, since
other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from qtool.runtime.engine.core import EngineCore
from qtool.runtime.engine.kv_cache_manager import KVCacheManager
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.engine.request import Request, ScheduledRequest, StepResult
from qtool.runtime.engine.scheduler import SchedulerConfig


class Instant:
    """An executor that answers at once; its own time is measured apart."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def submit(self, batch: Sequence[ScheduledRequest]) -> list[StepResult]:
        began = time.process_time()
        results = [StepResult(7) if work.sample else StepResult() for work in batch]
        self.seconds += time.process_time() - began
        return results

    def collect(self, step: list[StepResult]) -> list[StepResult]:
        return step


def cost_per_step(num_running: int, *, steps: int, policy: str, prompt_len: int, ahead: bool) -> float:
    """Microseconds of process time per step of `num_running` decodes."""
    room = prompt_len + steps + 8
    config = SchedulerConfig(num_running, max(2048, num_running), room, policy=policy)
    executor = Instant()
    core = EngineCore(config, KVCacheManager(num_running * -(-room // 16), 16), executor, run_ahead=ahead)
    params = SamplingParams(max_tokens=steps + 8, temperature=0)
    for i in range(num_running):
        core.add_request(Request(str(i), [i % 1000] * prompt_len, params))
    while any(request.num_output_tokens == 0 for request in core.scheduler.running) or core.scheduler.waiting:
        core.step()
    executor.seconds = 0.0
    began = time.process_time()
    for _ in range(steps // 2):
        core.step()
    return (time.process_time() - began - executor.seconds) / (steps // 2) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--prompt-len", type=int, default=100)
    args = parser.parse_args()
    print("running  run ahead  µs a step")
    for running in args.running:
        for ahead in (False, True):
            costs = [
                cost_per_step(running, steps=args.steps, policy=args.policy, prompt_len=args.prompt_len, ahead=ahead)
                for _ in range(args.rounds)
            ]
            print(f"{running:7}  {'yes' if ahead else 'no':>9}  {min(costs):9.0f}")


if __name__ == "__main__":
    main()
