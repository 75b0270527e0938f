"""The first steps of an engine, run before anyone measures or waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.params import SamplingParams

if TYPE_CHECKING:
    from qtool.runtime.llm_engine import LLMEngine


def warm_up(engine: LLMEngine) -> None:
    """Run two short requests through prefill and decode, so that the first client does not pay for what is lazy.

    Raises:
        QtoolError: the model does not run.
    """
    prompt = [0] * max(1, min(32, engine.max_model_len - 4))
    params = SamplingParams(max_tokens=min(4, engine.max_model_len - len(prompt)), temperature=0.0, ignore_eos=True)
    for number in range(2):
        engine.add_request(f"warm-up-{number}", prompt, params)
    while engine.has_unfinished():
        for output in engine.step():
            if output.outputs[0].finish_reason == "error":
                raise QtoolError(f"{engine.model_name} does not run: {output.outputs[0].stop_reason}")
