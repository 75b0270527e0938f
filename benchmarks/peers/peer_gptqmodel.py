"""GPTQModel: `python peer_gptqmodel.py REQUEST.json`; variant plain or act-order."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(request_file: Path) -> None:
    request = json.loads(request_file.read_text())

    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it wants two, and by itself gives two cores one
    from gptqmodel import GPTQModel, QuantizeConfig

    settings = QuantizeConfig(
        bits=4,
        group_size=request["group_size"],
        sym=request["symmetric"],
        desc_act=request["variant"] == "act-order",
        act_group_aware=False,
        device="cpu",
    )
    model = GPTQModel.load(request["model"], settings)
    tokens = request["tokens"]
    model.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in tokens], calibration_sort=None)
    model.save(request["out"])
    Path(request["out"], "result.json").write_text("{}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
