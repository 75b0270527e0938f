"""HQQ (no calibration): `python peer_hqq.py REQUEST.json`. Its zero points are floats, which no shared layout holds:
the dequantized weights are written, in float32, with the bits that HQQ's own layout takes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(request_file: Path) -> None:
    request = json.loads(request_file.read_text())

    import torch
    from hqq.core.quantize import BaseQuantizeConfig, Quantizer
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    group = request["group_size"]
    settings = BaseQuantizeConfig(nbits=4, group_size=group, axis=1)["weight_quant_params"]
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            codes, meta = Quantizer.quantize(module.weight.data, device="cpu", compute_dtype=torch.float32, **settings)
            module.weight.data = Quantizer.dequantize(codes, meta).reshape(module.weight.shape).float()
    folder = Path(request["out"])
    folder.mkdir(parents=True)
    tied = "lm_head.weight" if model.config.tie_word_embeddings else None
    state = {name: value.contiguous() for name, value in model.state_dict().items() if name != tied}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(Path(request["model"], "config.json").read_text())
    (folder / "result.json").write_text(json.dumps({"bits": 4 + 2 * 16 / group}))  # scale and zero point in 16 bits


if __name__ == "__main__":
    main(Path(sys.argv[1]))
