"""What a format writes it reads back bit for bit; packing is compressed-tensors' own; configs hit the right layers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.formats import open_reader, writer
from qtool.quant.formats.packing import pack, unpack
from qtool.quant.numerics import find_grid, quantize
from qtool.quant.scheme import QuantPlan, QuantScheme
from qtool.quant.weight import QuantizedWeight

LAYERS = [f"model.layers.{i}.{m}" for i in range(3) for m in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")]
SHAPES = dict.fromkeys(LAYERS, (40, 96))


def weights(plan: QuantPlan, search: str = "signed") -> dict[str, QuantizedWeight]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, scheme in plan.layers.items():
        weight = torch.randn(*SHAPES[name], generator=generator)
        if scheme is not None:
            found[name] = quantize(weight, find_grid(weight, scheme, search), scheme)  # type: ignore[arg-type]
    return found


def write(folder: Path, form: str, plan: QuantPlan, found: dict[str, QuantizedWeight]) -> None:
    out = writer(form)
    out.check_plan(plan, SHAPES)
    stored = {name: t for layer, weight in found.items() for name, t in out.tensors(layer, weight).items()}
    save_file(stored, folder / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": out.quantization_config(plan, "lm_head")}
    (folder / "config.json").write_text(json.dumps(config))


MIXED = QuantPlan(
    {
        name: [
            QuantScheme(4, 32),
            QuantScheme(8),
            QuantScheme(4, 32, False),
            None,
            QuantScheme(8, act_bits=8),
            QuantScheme(8, 32, False),
            QuantScheme(4),
            QuantScheme(4, 32),
            QuantScheme(4, 32),
        ][i]
        for i, name in enumerate(LAYERS)
    }
)


@pytest.mark.parametrize(
    ("form", "plan"),
    [
        ("compressed-tensors", MIXED),
        *[("compressed-tensors", QuantPlan(dict.fromkeys(LAYERS, QuantScheme.parse(n)))) for n in ("w4g32", "w8a8")],
        *[("gptq", QuantPlan(dict.fromkeys(LAYERS, QuantScheme.parse(n)))) for n in ("w4g32", "w4g32-asym", "w8")],
        *[("awq", QuantPlan(dict.fromkeys(LAYERS, QuantScheme.parse(n)))) for n in ("w4g32", "w4g32-asym", "w4")],
    ],
    ids=lambda v: v if isinstance(v, str) else "+".join(s.name for s in v.schemes()),
)
def test_round_trip_is_bit_exact(tmp_path: Path, form: str, plan: QuantPlan) -> None:
    found = weights(plan)
    if any(s.symmetric for s in plan.schemes()):
        assert any(bool((w.scale < 0).any()) for w in found.values())
    write(tmp_path, form, plan, found)
    with Checkpoint(tmp_path) as checkpoint:
        reader = open_reader(checkpoint)
        assert reader is not None
        assert reader.format == form
        for name, scheme in plan.layers.items():
            assert reader.scheme(name) == scheme
            if scheme is not None:
                back, sent = reader.read(name), found[name]
                assert torch.equal(back.codes, sent.codes)
                assert torch.equal(back.scale, sent.scale)
                assert torch.equal(back.dequantize(), sent.dequantize())
        assert reader.scheme("lm_head") is None


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq", "awq"])
def test_a_part_of_another_rank_or_size_is_one_line_that_names_the_layer(tmp_path: Path, form: str) -> None:
    plan = QuantPlan(dict.fromkeys(LAYERS, QuantScheme(4, 32, False)))
    layer, damage = LAYERS[0], {"scalar": lambda t: t.reshape(-1)[0].clone(), "empty": lambda t: t[:0].clone()}
    write(tmp_path, form, plan, weights(plan))
    whole = load_file(tmp_path / "model.safetensors")
    for name in (n for n in whole if n.startswith(f"{layer}.")):
        for change in damage.values():
            save_file({**whole, name: change(whole[name])}, tmp_path / "model.safetensors")
            with Checkpoint(tmp_path) as checkpoint:
                reader = open_reader(checkpoint)
                assert reader is not None
                with pytest.raises(QtoolError, match=re.escape(layer)):
                    reader.read(layer)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cols", [1, 7, 8, 63, 64])
def test_packing_is_that_of_compressed_tensors(bits: int, cols: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(0, 1 << bits, (5, cols), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    signed = (codes.int() - (1 << (bits - 1))).to(torch.int8)
    assert torch.equal(pack(codes, bits), helpers.pack_to_int32(signed, bits))
    assert torch.equal(unpack(pack(codes, bits), bits, cols), codes)


def test_every_layer_matches_exactly_one_config_group() -> None:
    config = writer("compressed-tensors").quantization_config(MIXED, "lm_head")

    def hit(name: str, targets: list[str]) -> bool:
        return any(re.match(t[3:], name) if t.startswith("re:") else t == name for t in targets)

    for name, scheme in MIXED.layers.items():
        groups = [g for g in config["config_groups"].values() if hit(name, g["targets"])]
        assert hit(name, config["ignore"]) == (scheme is None)
        assert len(groups) == (scheme is not None)
        if scheme is not None:
            assert groups[0]["weights"]["num_bits"] == scheme.bits
    assert hit("lm_head", config["ignore"])
    # neighbours whose names only begin alike are not caught
    assert not any(hit("model.layers.10.mlp.down_proj", g["targets"]) for g in config["config_groups"].values())


def test_gptq_version_1_stores_zero_minus_one_and_version_2_the_zero(tmp_path: Path) -> None:
    for name, stored in (("w4g32", 7), ("w8", 127)):
        plan = QuantPlan({LAYERS[0]: QuantScheme.parse(name)})
        tensors = writer("gptq").tensors(LAYERS[0], weights(plan)[LAYERS[0]])
        assert bool((unpack(tensors[f"{LAYERS[0]}.qzeros"], QuantScheme.parse(name).bits, 40) == stored).all())
    plan = QuantPlan({LAYERS[0]: QuantScheme(4, 32, symmetric=False)})
    found = weights(plan)[LAYERS[0]]
    tensors = writer("gptq").tensors(LAYERS[0], found)
    assert found.zero is not None
    assert torch.equal(unpack(tensors[f"{LAYERS[0]}.qzeros"], 4, 40), found.zero.T)


@pytest.mark.parametrize(
    ("form", "plan", "message"),
    [
        ("gptq", MIXED, "one bit width and group size"),
        ("awq", QuantPlan(dict.fromkeys(LAYERS, QuantScheme(8))), "4-bit weights alone"),
        ("compressed-tensors", QuantPlan({LAYERS[0]: QuantScheme(4, 32, True, 8)}), "use w8a8"),
    ],
)
def test_plans_that_a_format_cannot_hold_are_refused(form: str, plan: QuantPlan, message: str) -> None:
    with pytest.raises(QtoolError, match=message):
        writer(form).check_plan(plan, SHAPES)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "'gemv' is not supported"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 64}, "3 bits per weight"),
        ({"quant_method": "gptq", "bits": 4}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "is_marlin_format": True}, "not supported"),
        ({"quant_method": "compressed-tensors"}, "no config_groups"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "g": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
                },
            },
            "float weights",
        ),
        ("nonsense", "no JSON object"),
    ],
)
def test_unknown_layouts_are_refused_by_name(tmp_path: Path, section: Any, message: str) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": section}))
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(QtoolError, match=message):
        open_reader(checkpoint)
    assert writer("gptq")
    with pytest.raises(QtoolError, match="unknown format"):
        writer("gguf")


@pytest.mark.parametrize(
    "change",
    [
        {"config_groups": {"group_0": 3}},
        {"ignore": "lm_head"},
        {"ignore": ["re:("]},
        *({"group": g} for g in ({"targets": "Linear"}, {"targets": ["re:("]}, {"weights": {"strategy": "channel"}})),
        {"group": {"weights": {"num_bits": 4, "strategy": "group"}}},
        {"group": {"input_activations": 8}},
    ],
    ids=str,
)
def test_a_damaged_compressed_tensors_section_is_refused(
    tiny_llama: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}
    section = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group | change.get("group", {})}}
    shutil.copytree(tiny_llama, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"] = section | {k: v for k, v in change.items() if k != "group"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with Checkpoint(tmp_path / "m") as checkpoint, pytest.raises(QtoolError, match="quantization_config"):
        open_reader(checkpoint)


def stored_in_bytes(folder: Path, bits: int, weight: torch.Tensor) -> QuantizedWeight:
    """Read one int-quantized layer, as another tool may have written it."""
    folder.mkdir()
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "strategy": "channel", "symmetric": True}}
    section = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": group}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    tensors = {"a.weight": weight, "a.weight_scale": torch.tensor([[0.5], [2.0]])}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint(folder) as checkpoint:
        reader = open_reader(checkpoint)
        assert reader is not None
        return reader.read("a")


def test_integers_of_a_byte_are_read_by_their_bits_and_others_refused(tmp_path: Path) -> None:
    values = torch.tensor([[-8, 7], [3, 0]], dtype=torch.int8)
    want = torch.tensor([[-4.0, 3.5], [6.0, 0.0]])
    assert torch.equal(stored_in_bytes(tmp_path / "four", 4, values).dequantize(), want)
    assert torch.equal(stored_in_bytes(tmp_path / "eight", 8, values).dequantize(), want)
    with pytest.raises(QtoolError, match="layer a: weight holds values beyond 4 bits"):
        stored_in_bytes(tmp_path / "wide", 4, values * 2)
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(QtoolError, match=f"layer a: weight is {name}, expected int8"):
            stored_in_bytes(tmp_path / name, 8, torch.ones(2, 2).to(dtype))
