"""lm-eval's own command line with our model in its registry.

    python -m qtool.evalsets.lm_eval_cli run --model qtool --model_args pretrained=MODEL --tasks arc_easy

lm-eval finds model classes by importing them and has no entry points for others' packages; this module is the import.
From Python, `import qtool.evalsets.harness` does the same for `lm_eval.simple_evaluate(model="qtool", ...)`.
"""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

import qtool.evalsets.harness  # noqa: F401 - registers the model class

if __name__ == "__main__":
    cli_evaluate()
