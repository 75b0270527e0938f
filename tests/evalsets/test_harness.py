"""Our lm-eval model class against lm-eval's own Hugging Face class on a tiny random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from qtool.evalsets import harness, task_runs
from qtool.evalsets.items import ChoiceSet, Item
from qtool.quant.documents import load_tokenizer
from qtool.quant.errors import QtoolError

PAIRS = [
    ("the cat sat on", " the mat"),
    ("the cat sat on ", "the mat"),  # the space moves over to the continuation
    ("", "in the beginning"),
    ("", "<s>in the end"),  # brings its own BOS
    ("<s>once", " upon a time"),
    ("x" * 140, " too long a context"),  # beyond 128 tokens: loses its beginning
    ("天空", "是蓝色的"),
]


@pytest.fixture(scope="module")
def both(tiny: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype="float32")
    return HFLM(pretrained=model, tokenizer=load_tokenizer(tiny), batch_size=1), tiny


def _ours(folder: Path, served: Any) -> harness.QtoolLM:
    return harness.QtoolLM(served=served(folder), tokenizer=load_tokenizer(folder))


def _instances(kind: Any, arguments: list[Any]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=0) for a in arguments]


def test_loglikelihoods_equal_lm_evals_own(both: tuple[Any, Path], fake_served: Any) -> None:
    theirs, folder = both
    ours = _ours(folder, fake_served)
    requests = _instances("loglikelihood", PAIRS)
    for pair, (a, greedy_a), (b, greedy_b) in zip(
        PAIRS, theirs.loglikelihood(requests), ours.loglikelihood(requests), strict=True
    ):
        assert a == pytest.approx(b, abs=1e-4), pair
        assert greedy_a == greedy_b


def test_a_context_of_spaces_begins_as_an_empty_text_does(both: tuple[Any, Path], fake_served: Any) -> None:
    """lm-eval moves its spaces to the continuation, and then fails on what is left."""
    theirs, folder = both
    ours = _ours(folder, fake_served)
    (moved,) = ours.loglikelihood(_instances("loglikelihood", [(" ", "the mat")]))
    (empty,) = theirs.loglikelihood(_instances("loglikelihood", [("", " the mat")]))
    assert moved == (pytest.approx(empty[0], abs=1e-4), empty[1])
    options = {"until": [], "max_gen_toks": 5}
    bare, started = ours.generate_until(_instances("generate_until", [("", options), ("<s>", options)]))
    assert bare == started


def test_rolling_loglikelihoods_equal_lm_evals_own(both: tuple[Any, Path], fake_served: Any) -> None:
    theirs, folder = both
    text = "the rain in the plain and then the winter " * 9
    requests = _instances("loglikelihood_rolling", [(text,)])
    (a,) = theirs.loglikelihood_rolling(requests)
    (b,) = _ours(folder, fake_served).loglikelihood_rolling(requests)
    assert a == pytest.approx(b, abs=1e-3)


LENGTHS = (127, 128, 129, 133)  # around the 128 tokens that the model takes


@pytest.fixture(scope="module", params=["stand-in", "runtime"])
def ours(request: Any, both: tuple[Any, Path], fake_served: Any) -> harness.QtoolLM:
    """Our class over transformers, and over our runtime."""
    return _ours(both[1], fake_served if request.param == "stand-in" else _runtime)


def _runtime(folder: Path) -> harness.Served:
    return harness.serve(folder, dtype="float32", device="cpu")


def _digits(count: int) -> str:
    """A text of so many tokens, no two of its ends alike."""
    return "".join(str(i * i % 97 % 10) for i in range(count))


@pytest.mark.parametrize("choice", ["b", "bcd", "b" * 128])
def test_contexts_too_long_lose_as_much_as_in_lm_evals_own(
    both: tuple[Any, Path], ours: harness.QtoolLM, choice: str
) -> None:
    theirs, _ = both
    pairs = [(_digits(count), choice) for count in LENGTHS]
    for (context, _), pair in zip(pairs, (ours._encode_pair(*p) for p in pairs), strict=True):
        assert [len(part) for part in pair] == [len(context), len(choice)]
    requests = _instances("loglikelihood", pairs)
    found, wanted = ours.loglikelihood(requests), theirs.loglikelihood(requests)
    for (context, _), (a, greedy_a), (b, greedy_b) in zip(pairs, found, wanted, strict=True):
        assert a == pytest.approx(b, abs=1e-3), len(context)
        assert greedy_a == greedy_b
    # one token less of the context would be seen
    room = 129 - len(choice)
    if room > 1:
        less = ours.loglikelihood(_instances("loglikelihood", [(_digits(133)[-room + 1 :], choice)]))
        assert abs(less[0][0] - wanted[-1][0]) > 0.01


def test_texts_around_the_length_roll_as_in_lm_evals_own(both: tuple[Any, Path], ours: harness.QtoolLM) -> None:
    requests = _instances("loglikelihood_rolling", [(_digits(count),) for count in (*LENGTHS, 256, 257, 300)])
    found, wanted = ours.loglikelihood_rolling(requests), both[0].loglikelihood_rolling(requests)
    assert found == pytest.approx(wanted, abs=5e-3)


def test_prompts_too_long_are_continued_as_in_lm_evals_own(both: tuple[Any, Path], ours: harness.QtoolLM) -> None:
    options = {"until": ["</s>"], "max_gen_toks": 8, "do_sample": False}
    requests = _instances("generate_until", [(_digits(count), dict(options)) for count in (119, 120, 121, *LENGTHS)])
    assert ours.generate_until(requests) == both[0].generate_until(requests)


@pytest.mark.model
@pytest.mark.slow
def test_runtime_and_transformers_agree_on_the_default_model(default_model: Path) -> None:
    """Our class over our runtime, batched, against lm-eval's class over transformers: 40 sentences, float32."""
    from qtool.evalsets.grammar import grammar_set
    from qtool.runtime.llm import LLM

    tokenizer = load_tokenizer(default_model)
    requests = _instances("loglikelihood", [("", c) for i in grammar_set().items[::25] for c in i.choices])
    served = LLM(default_model, dtype="float32", device="cpu")
    ours = harness.QtoolLM(served=served, tokenizer=tokenizer).loglikelihood(requests)
    theirs = HFLM(pretrained=str(default_model), dtype="float32", device="cpu", batch_size=8).loglikelihood(requests)
    for (a, greedy_a), (b, greedy_b) in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, abs=1e-3)
        assert greedy_a == greedy_b


def test_registered_by_name() -> None:
    assert get_model("qtool") is harness.QtoolLM


def test_a_choice_set_runs_by_lm_eval(both: tuple[Any, Path], fake_served: Any) -> None:
    """Scores, margins and per-character scores against likelihoods computed by hand; odd contexts kept verbatim."""
    _, folder = both
    ours = _ours(folder, fake_served)
    items = (
        Item("a", "the cat {{sat}} on", ("the mat", "a hat", "thin air"), 1),
        Item("b", "", ("in the end", "on the end of it"), 0, ""),
        Item("c", "answer", ("天", "地"), 1, ""),
    )
    (result,) = task_runs.run_choice_sets(ours, [ChoiceSet("odd", items, "here")])
    assert list(result.scores) == ["a", "b", "c"]
    assert result.chance == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3)
    for item in items:
        pairs = [(item.context, item.delimiter + c) for c in item.choices]
        ll = [score for score, _ in ours.loglikelihood(_instances("loglikelihood", pairs))]
        assert result.scores[item.id] == float(ll.index(max(ll)) == item.answer)
        per_char = [score / len(c) for score, c in zip(ll, item.choices)]
        assert result.normalised is not None
        assert result.normalised[item.id] == float(per_char.index(max(per_char)) == item.answer)
        assert result.margins is not None
        wrong = max(score for i, score in enumerate(ll) if i != item.answer)
        assert result.margins[item.id] == pytest.approx(ll[item.answer] - wrong, abs=1e-5)


def test_generation_options_of_lm_eval() -> None:
    sampling = harness._sampling({"until": ["\n", ""], "max_gen_toks": 7, "do_sample": False, "temperature": 0.7})
    assert (sampling.max_tokens, sampling.greedy, tuple(sampling.stop)) == (7, True, ("\n",))
    sampling = harness._sampling({"do_sample": True, "until": "Q:"})
    assert (sampling.max_tokens, sampling.temperature, tuple(sampling.stop)) == (256, 1.0, ("Q:",))


def test_a_choice_without_tokens_or_too_long_is_refused(both: tuple[Any, Path], fake_served: Any) -> None:
    ours = _ours(both[1], fake_served)
    with pytest.raises(QtoolError, match="after 'on and on' is too long: 129 tokens, but the model takes 128"):
        ours.loglikelihood(_instances("loglikelihood", [("on and on", "b" * 129)]))
    with pytest.raises(QtoolError, match="'e' after 'th' adds no token"):  # "the" is one token, as "th" is
        ours.loglikelihood(_instances("loglikelihood", [("th", "e")]))
    with pytest.raises(QtoolError, match="pretrained"):
        harness.QtoolLM()


def test_named_tasks_without_a_hub_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    with pytest.raises(QtoolError, match="does not answer"):
        task_runs._check_hub(["arc_easy"])
