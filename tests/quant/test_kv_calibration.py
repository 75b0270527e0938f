"""What calibration says of keys and values, against transformers' own cache; and the artifact that stores it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from qtool.quant.artifact import read_record
from qtool.quant.calibration import BlockWalker, CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.convert import convert
from qtool.quant.errors import QtoolError
from qtool.quant.kv_calibration import ERROR_LIMIT, KVRecord, calibrate_kv, kv_notes
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantScheme

TOKENS = torch.randint(1, 128, (6, 32), generator=torch.Generator().manual_seed(0))
CALIBRATION = CalibrationSet(TOKENS, "random tokens", "0" * 64)


class Seen(DynamicCache):
    """transformers' cache, that keeps the largest magnitudes and can round what goes through it."""

    def __init__(self, rounding: str | None = None) -> None:
        super().__init__()
        self.rounding = rounding
        self.largest: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.largest.append((keys.abs().amax((0, 2, 3)), values.abs().amax((0, 2, 3))))
        found: tuple[Tensor, Tensor] = super().update(self._round(keys), self._round(values), layer, *args, **kwargs)
        return found

    def _round(self, x: Tensor) -> Tensor:
        if self.rounding is None:
            return x
        x = x.double()
        top = x.abs().amax(-1, keepdim=True) if self.rounding == "token" else x.abs().max()
        return ((x / top * 127).round() / 127 * top).float()


def first_attention(model: Any, rounding: str | None) -> Tensor:
    """What the first block's output projection reads, and so the attention before it gives."""
    found: list[Tensor] = []
    handle = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with torch.no_grad():
        model(TOKENS, past_key_values=Seen(rounding))
    handle.remove()
    return found[0].double()


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
def test_records_are_those_of_transformers(tiny_model: Any, family: str) -> None:
    folder = tiny_model(family)
    with Checkpoint(folder) as checkpoint:
        records = [calibrate_kv(block) for block in BlockWalker(checkpoint, TOKENS, batch_tokens=64)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    cache = Seen()
    with torch.no_grad():
        model(TOKENS, past_key_values=cache)
    for record, (keys, values) in zip(records, cache.largest, strict=True):
        assert record.key_max == pytest.approx(keys.tolist(), rel=1e-4)
        assert record.value_max == pytest.approx(values.tolist(), rel=1e-4)
        assert record.scales == pytest.approx((float(keys.max()) / 127, float(values.max()) / 127), rel=1e-4)
    exact = first_attention(model, None)
    for error, rounding in ((records[0].dynamic_error, "token"), (records[0].static_error, "tensor")):
        want = float((first_attention(model, rounding) - exact).norm() / exact.norm())
        assert error == pytest.approx(
            want, rel=0.05
        )  # our scales are bfloat16: another grid by up to a quarter percent


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_the_artifact_declares_and_stores_what_was_measured(tiny_llama: Path, tmp_path: Path, method: str) -> None:
    arguments: dict[str, Any] = {"scheme": QuantScheme(4, 32), "method": method, "calibration": CALIBRATION}
    report = quantize(tiny_llama, tmp_path / "kv", kv_cache="int8", **arguments)
    quantize(tiny_llama, tmp_path / "again", kv_cache="int8", **arguments)
    quantize(tiny_llama, tmp_path / "plain", **arguments)
    stored, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("kv", "plain"))
    for i, record in enumerate(report.kv):
        for name, scale in zip(("k_scale", "v_scale"), record.scales):
            tensor = stored.pop(f"model.layers.{i}.self_attn.{name}")
            assert tensor.shape == (1,)
            assert tensor.item() == pytest.approx(scale, rel=1e-6)
    assert stored.keys() == plain.keys()
    assert all(torch.equal(stored[n], plain[n]) for n in plain), "the weights are what they are without it"
    section = json.loads((tmp_path / "kv/config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert (section["num_bits"], section["type"], section["strategy"], section["dynamic"]) == (
        8,
        "int",
        "tensor",
        False,
    )
    facts = read_record(tmp_path / "kv")["kv_cache"]
    assert [block["static_error"] for block in facts["blocks"]] == [record.static_error for record in report.kv]
    assert read_record(tmp_path / "plain")["kv_cache"] is None
    for name in ("model.safetensors", "config.json", "qtool.json"):
        assert (tmp_path / "kv" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_values_are_measured_after_awq_has_scaled_them(tiny_llama: Path, tmp_path: Path) -> None:
    """The static scale of the values is that of the weights that are stored, not of the 16-bit model's."""
    arguments: dict[str, Any] = {"scheme": QuantScheme(8), "calibration": CALIBRATION, "kv_cache": "int8"}
    reports = [quantize(tiny_llama, tmp_path / m, method=m, **arguments) for m in ("awq", "rtn")]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    cache = Seen()
    with torch.no_grad():
        model(TOKENS, past_key_values=cache)
    original = cache.largest[0][1].tolist()
    assert reports[1].kv[0].value_max == pytest.approx(original, rel=0.02)  # w8 alone
    scaled = load_file(tmp_path / "awq/model.safetensors")["model.layers.0.self_attn.v_scale"].item()
    assert scaled == pytest.approx(max(reports[0].kv[0].value_max) / 127, rel=1e-6)


def test_coarse_scales_are_said() -> None:
    fine, coarse = KVRecord((1.0,), (1.0,), 0.01, ERROR_LIMIT / 2), KVRecord((1.0,), (1.0,), 0.02, 0.4)
    assert kv_notes([fine, fine]) == ()
    (note,) = kv_notes([fine, coarse])
    assert "1 blocks" in note
    assert "block 1 by 40.0%" in note
    assert "--kv-cache-dtype int8" in note


def test_silent_keys_and_values_get_a_scale_all_the_same() -> None:
    key, value = KVRecord((0.0, 0.0), (0.0, 0.0), 0.0, 0.0).scales
    assert key > 0
    assert value > 0


def test_formats_and_values_that_cannot_say_it_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"scheme": QuantScheme(4, 32), "method": "rtn", "calibration": CALIBRATION}
    with pytest.raises(QtoolError, match="the gptq format cannot say that the KV cache is int8"):
        quantize(tiny_llama, tmp_path / "out", format="gptq", kv_cache="int8", **arguments)
    with pytest.raises(QtoolError, match="KV cache 'fp8' is not supported: use one of float, int8"):
        quantize(tiny_llama, tmp_path / "out", kv_cache="fp8", **arguments)
    assert not (tmp_path / "out").exists()
    quantize(tiny_llama, tmp_path / "kv", kv_cache="int8", **arguments)
    with pytest.raises(QtoolError, match="the gptq format cannot say that the KV cache is int8"):
        convert(tmp_path / "kv", tmp_path / "gptq", format="gptq")
