"""qtool: measure, plan, quantize, prove and serve language models in INT4/INT8.

The public names load on first use, so that `import qtool` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qtool._version import __version__

if TYPE_CHECKING:
    from qtool.evalsets.compare import compare
    from qtool.quant.pipeline import quantize
    from qtool.runtime.beam_search import BeamSearchParams
    from qtool.runtime.engine.params import SamplingParams, StructuredOutputsParams
    from qtool.runtime.llm import LLM
    from qtool.sensitivity.probe import analyze

_HOME = {
    "BeamSearchParams": "qtool.runtime.beam_search",
    "LLM": "qtool.runtime.llm",
    "SamplingParams": "qtool.runtime.engine.params",
    "StructuredOutputsParams": "qtool.runtime.engine.params",
    "analyze": "qtool.sensitivity.probe",
    "compare": "qtool.evalsets.compare",
    "quantize": "qtool.quant.pipeline",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "analyze",
    "compare",
    "quantize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qtool' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
