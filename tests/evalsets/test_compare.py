"""The whole comparison on tiny models, served by a stand-in for the runtime; the report; the exit status."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.evalsets.compare import Comparison, compare
from qtool.evalsets.divergence import LogitSpool
from qtool.evalsets.gate import Thresholds
from qtool.evalsets.report import html, write_report
from qtool.evalsets.report_cells import HEADER, metric_row, signed
from qtool.evalsets.statistics import Verdict
from qtool.quant.errors import QtoolError


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set that even a random model answers: the right choice is one letter, the wrong one thirty."""
    path = tmp_path_factory.mktemp("task") / "short.jsonl"
    rows = [{"id": f"i{n}", "context": f"item {n} <b>", "choices": ["x" * 30, "y"], "answer": 1} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def _compare(base: Path, candidate: Path, served: Any, **options: Any) -> Comparison:
    # 60 items without a flip prove a drop below 4.9 points
    options = {"windows": 4, "context": 96, "generations": 2, "thresholds": Thresholds(max_drop=0.05), **options}
    return compare(base, candidate, serve=served, **options)


def test_a_model_against_itself_passes(tiny: Path, task: Path, fake_served: Any) -> None:
    same = _compare(tiny, tiny, fake_served, tasks=[task])
    assert same.verdict is Verdict.PASS
    assert same.divergence.kl.max < 1e-6
    assert same.divergence.same_top1 == 1.0
    assert same.noise.mean_kl < 1e-6
    assert same.noise.flips == 0
    assert all(len(metric_row(m)) == len(HEADER) for m in same.metrics)
    assert "Every metric is within its limit" in html([same], ["qtool"])
    assert [m.verdict for m in same.metrics] == [Verdict.PASS] * 3


def test_perplexity_is_that_of_transformers(tiny: Path, tiny_noisy: Path, fake_served: Any) -> None:
    """Perplexity, KL and agreement recomputed here from transformers' loss and logits in float64."""
    from transformers import AutoModelForCausalLM

    from qtool.evalsets.windows import text_windows
    from qtool.quant.documents import load_tokenizer

    result = _compare(tiny, tiny_noisy, fake_served, tasks=[])
    tokens = text_windows(load_tokenizer(tiny), None, windows=4, context=96).tokens
    models = [AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval() for p in (tiny, tiny_noisy)]
    with torch.no_grad():
        losses = [m(tokens, labels=tokens).loss.item() for m in models]
        p, q = (m(tokens).logits[:, :-1].double().log_softmax(-1) for m in models)
    kl = (p.exp() * (p - q)).sum(-1)
    metrics = {m.name: m for m in result.metrics}
    assert metrics["perplexity"].base == pytest.approx(math.exp(losses[0]), rel=1e-4)
    assert metrics["perplexity"].candidate == pytest.approx(math.exp(losses[1]), rel=1e-4)
    assert metrics["mean token KL"].candidate == pytest.approx(kl.mean().item(), rel=1e-4)
    assert result.divergence.same_top1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert result.windows.worst[0].kl == pytest.approx(kl.max().item(), rel=1e-4)
    assert result.verdict is Verdict.FAIL


def test_the_report_is_whole_and_fetches_nothing(
    tiny: Path, tiny_noisy: Path, task: Path, tmp_path: Path, fake_served: Any
) -> None:
    candidate = tmp_path / "candidate"
    shutil.copytree(tiny_noisy, candidate)
    layers = {
        f"model.layers.{b}.{p}": {"scheme": "w8" if b else "w4g64", "relative_error": 0.01 * (b + 1)}
        for b in range(2)
        for p in ("self_attn.q_proj", "mlp.down_proj")
    }
    (candidate / "qtool.json").write_text(json.dumps({"layers": layers}))
    result = _compare(tiny, candidate, fake_served, tasks=[task])
    page, document = write_report(result, tmp_path / "out", ["qtool", "compare", "a", "b & c"])
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["compare.json", "report.html"]

    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)\s*=|url\(|@import|<script", text)
    assert "item 0 &lt;b&gt;" in text or result.metrics[2].losses == 0
    assert "'b &amp; c'" in text or "&#x27;b &amp; c&#x27;" in text
    assert text.count("<svg") == 5
    for m in result.metrics:
        assert m.name in text
    assert "model.layers.1.mlp.down_proj: w8, error" in text
    _Balanced().check(text)

    read = json.loads(document.read_text(encoding="utf-8"))
    assert read["verdict"] == "FAIL"
    assert read["metrics"][1]["base"] == pytest.approx(result.metrics[1].base)
    assert len(read["worst"]) == 20
    assert {n: (f["scheme"], f["relative_error"]) for n, f in read["schemes"].items() if n in layers} == {
        n: (f["scheme"], f["relative_error"]) for n, f in layers.items()
    }
    assert all(0.15 < f["distance"] < 0.25 for f in read["schemes"].values())  # a fifth of the spread was added
    assert read["suspects"] == []
    assert [p["name"] for p in read["generation"]] == ["text"]
    assert read["command"] == "qtool compare a 'b & c'"
    assert len(read["tasks"][0]["items"]) == 60


class _Balanced(HTMLParser):
    """Fails where a tag is closed that is not open, or left open."""

    VOID = ("meta",)

    def check(self, text: str) -> None:
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_bad_input_is_refused_before_a_model_is_loaded(tiny: Path, tmp_path: Path, task: Path) -> None:
    def serve(folder: Path) -> Any:
        raise AssertionError("a model was loaded")

    other = shutil.copytree(tiny, tmp_path / "other")
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "</s>"}))
    short = tmp_path / "short.txt"
    short.write_text("too little text")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("different tokenizers", {"candidate": other}),
        ("no such folder", {"candidate": tmp_path / "missing"}),
        ("15 tokens of text, but 4 windows of 96 need 384", {"data": short}),
        ("at least 2", {"windows": 1}),
        ("at least 2 tokens", {"context": 1}),
        ("no such file", {"tasks": [tmp_path / "none.jsonl"]}),
        ("two sets are called", {"tasks": [task, task]}),
        ("seed -1 is not from 0", {"seed": -1}),
    ]
    for message, options in cases:
        arguments: dict[str, Any] = {"base": tiny, "candidate": tiny, "windows": 4, "context": 96, "serve": serve}
        with pytest.raises(QtoolError, match=message):
            compare(**{**arguments, "tasks": [], **options})


def test_a_context_longer_than_the_model_is_refused(tiny: Path, fake_served: Any) -> None:
    with pytest.raises(QtoolError, match="takes 128 tokens at most"):
        compare(tiny, tiny, windows=2, context=129, tasks=[], serve=fake_served)


def test_the_spool_gives_back_what_it_was_given() -> None:
    logits = [torch.randn(5, 7), torch.randn(5, 7)]
    with LogitSpool() as spool:
        for window in logits:
            spool.append(window)
        assert torch.equal(spool.window(1), logits[1])
        assert torch.equal(spool.window(0), logits[0])
        with pytest.raises(IndexError):
            spool.window(2)
        with pytest.raises(QtoolError, match="TMPDIR"):
            spool.reserve(10**9, 1000, 50_000)


def test_signed_numbers() -> None:
    assert signed(1.5, 2) == "+1.50"
    assert signed(-1.5, 1, " pt") == "−1.5 pt"
    assert signed(-0.0001, 2) == "0.00"
    assert signed(math.nan, 2) == "not finite"
