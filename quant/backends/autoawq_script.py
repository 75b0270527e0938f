"""Runs AutoAWQ 0.2.9: `python autoawq_script.py REQUEST.json`. Stands alone: qtool is not imported.

The request: model (folder), out (folder to write), tokens (list of equally long lists of ids), bits, group_size.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any


def copy_values(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state_dict post hook: values that do not share the weights' memory."""
    for name, value in state.items():
        state[name] = value.clone()


def main(request_file: Path) -> None:
    request = json.loads(request_file.read_text(encoding="utf-8"))

    import torch
    import transformers
    from awq import AutoAWQForCausalLM
    from awq.quantize.quantizer import AwqQuantizer

    class Quantizer(AwqQuantizer):  # type: ignore[misc]
        """AutoAWQ's own (its `quantizer_cls` is made for this), telling how far it is, and sound on a CPU.

        The scale search multiplies the weights in place and restores them from `v.cpu()` of the state dict. That is a
        copy on a GPU; on a CPU it is the very weights, which then stay scaled. A real copy gives the GPU's results.
        """

        def _get_input_feat(self, layer: Any, named_linears: Any) -> Any:
            done = next(i for i, module in enumerate(self.modules) if module is layer)
            print(f"@progress {done} {len(self.modules)}", flush=True)
            return super()._get_input_feat(layer, named_linears)

        def _compute_best_scale(
            self, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, *rest: Any, **named: Any
        ) -> Any:
            handle = module2inspect.register_state_dict_post_hook(copy_values)
            try:
                return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *rest, **named)
            finally:
                handle.remove()

    tokens = request["tokens"]
    settings = {
        "zero_point": True,
        "q_group_size": request["group_size"],
        "w_bit": request["bits"],
        "version": "GEMM",
    }
    model = AutoAWQForCausalLM.from_pretrained(request["model"])
    print(f"loaded in {next(model.model.parameters()).dtype}", flush=True)
    model.quantize(
        None,  # the tokenizer: ids need none
        quant_config=settings,
        calib_data=tokens,
        max_calib_samples=len(tokens),
        max_calib_seq_len=len(tokens[0]),
        quantizer_cls=Quantizer,
    )
    model.save_quantized(request["out"])
    result = {
        "versions": {
            "autoawq": importlib.metadata.version("autoawq"),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "settings": settings,
    }
    Path(request["out"], "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
