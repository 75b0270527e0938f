"""Which model is this? A short hash that tells two checkpoints apart without reading all of a large one."""

from __future__ import annotations

import hashlib
import json

from qtool.quant.checkpoint import Checkpoint

_SAMPLE = 1 << 16  # bytes of each sample
_SAMPLES = 64  # samples per weight file, evenly spaced


def model_fingerprint(checkpoint: Checkpoint) -> str:
    """sha256 (hex) over config, tensor names and shapes, and 64 samples of 64 KiB of each weight file.

    Another model, another revision or a quantized copy gives another value; a copy of the folder gives the same one.
    Fields of the config that only tell where and by what it was written are left out.
    """
    config = {k: v for k, v in checkpoint.config.items() if k not in ("_name_or_path", "transformers_version")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name in checkpoint.names():
        digest.update(f"{name}{checkpoint.shape(name)}".encode())
    for path in checkpoint.files:
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE) * i // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
