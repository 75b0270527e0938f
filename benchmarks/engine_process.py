"""What it costs that the engine has a process of its own: `python benchmarks/engine_process.py`.

One step of N requests, a token each, in microseconds of process time: written and sent by the engine's process, read by
the server's, and made text there. The last would be the engine's own work if both were one process: it is what no
longer stands between two steps. The fastest of several rounds, since other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable

import zmq

from qtool.quant.hub import resolve_model
from qtool.runtime.engine.core import EngineStats
from qtool.runtime.engine.params import RequestMetrics, SamplingParams
from qtool.runtime.engine.updates import OutputUpdate, RequestUpdate
from qtool.runtime.output_processor import OutputProcessor
from qtool.runtime.server.messages import Report, StepDone, decode_report, encode
from qtool.runtime.tokenizer import load_tokenizer

ROUNDS, STEPS = 5, 100
STATS = EngineStats(*range(1000, 1017))


def reports_of(ids: list[str], vocabulary: int) -> list[StepDone]:
    """Steps of random tokens; the first has the requests' moments."""
    rng = random.Random(0)
    steps = []
    for step in range(STEPS):
        metrics = RequestMetrics(1.0, 2.0, 3.0) if step == 0 else None
        updates = [RequestUpdate(i, [OutputUpdate(0, [rng.randrange(vocabulary)])], None, metrics) for i in ids]
        steps.append(StepDone(updates, STATS, time.monotonic()))
    return steps


def fastest(work: Callable[[], None]) -> float:
    """Microseconds of process time per step."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        found.append((time.process_time() - began) / STEPS * 1e6)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="whose tokenizer makes the text")
    tokenizer = load_tokenizer(resolve_model(parser.parse_args().model))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    out, back = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    with tempfile.TemporaryDirectory() as folder:
        out.bind(f"ipc://{folder}/s")
        back.connect(f"ipc://{folder}/s")
        print("microseconds of process time per step\nrequests   bytes   write   send+receive   read   text")
        for count in (1, 16, 64, 256):
            ids = [f"cmpl-{i:032x}-0" for i in range(count)]
            steps = reports_of(ids, len(tokenizer))
            data = [encode(step) for step in steps]
            read: list[Report] = [decode_report(each) for each in data]
            assert read == steps

            def there_and_back(data: list[bytes] = data) -> None:
                for each in data:
                    out.send(each)
                    back.recv()

            def make_text(ids: list[str] = ids, steps: list[StepDone] = steps) -> None:
                processor = OutputProcessor(tokenizer)
                for i in ids:
                    processor.add(i, [1, 2, 3], SamplingParams(max_tokens=STEPS + 1))
                for step in steps:
                    processor.process(step.updates)

            costs = [
                fastest(lambda steps=steps: [encode(step) for step in steps]),  # type: ignore[misc]
                fastest(there_and_back),
                fastest(lambda data=data: [decode_report(each) for each in data]),  # type: ignore[misc]
                fastest(make_text),
            ]
            print(f"{count:8} {len(data[-1]):7} {costs[0]:7.1f} {costs[1]:14.1f} {costs[2]:6.1f} {costs[3]:6.0f}")
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
