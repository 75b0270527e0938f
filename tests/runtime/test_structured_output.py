"""Outputs with a form: jsonschema, Python's `re` and the `regex` package's partial matches are the judges."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.params import SamplingParams, StructuredOutputsParams
from qtool.runtime.engine.structured_output import Misfit
from qtool.runtime.executor import structured_output
from qtool.runtime.executor.sampler import SamplingRow, sample
from qtool.runtime.executor.structured_output import GrammarCompiler, GrammarMatcher, token_masks
from qtool.runtime.llm import LLM

jsonschema = pytest.importorskip("jsonschema")
regex = pytest.importorskip("regex")
pytest.importorskip("llguidance")

SCHEMAS = [
    {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 130}, "ok": {"type": "boolean"}},
        "required": ["age", "ok"],
        "additionalProperties": False,
    },
    {"enum": ["red", "green", 3, None]},
    {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,3}$"}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"const": {"a": [1, 2]}}, {"type": "string", "maxLength": 3}]},
]


@pytest.fixture(scope="module")
def llm(tiny_model: Any) -> LLM:
    return LLM(tiny_model(), device="cpu", kv_cache_memory=1 << 22)


@pytest.fixture(scope="module")
def compiler(llm: LLM) -> GrammarCompiler:
    return llm.engine.grammars


def formed(count: int = 150, seed: int = 0, **form: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, seed=seed, structured_outputs=StructuredOutputsParams(**form))


def texts(llm: LLM, params: list[SamplingParams]) -> list[str]:
    outputs = [o.outputs[0] for o in llm.generate(["x"] * len(params), params)]
    assert [o.finish_reason for o in outputs] == ["stop"] * len(params)
    return [o.text for o in outputs]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: next(iter(s)))
def test_json_is_valid_by_its_schema(llm: LLM, schema: dict[str, Any]) -> None:
    given: list[Any] = [schema, json.dumps(schema)]
    found = texts(llm, [formed(json=given[i % 2], disable_any_whitespace=True, seed=i) for i in range(8)])
    for text in found:
        jsonschema.validate(json.loads(text), schema)
    assert len(set(found)) > 1


def test_a_regular_expression_is_matched_from_end_to_end(llm: LLM) -> None:
    pattern = r"(ab|cd?)[0-9]{2,4}-[^a-z\x00-\x1f\x7f-\U0010ffff]{3}"
    for text in texts(llm, [formed(regex=pattern, seed=i) for i in range(12)]):
        assert re.fullmatch(pattern, text), text


def test_a_choice_ends_where_nothing_can_follow(llm: LLM) -> None:
    choices = ['say "no"', "back\\slash", "line\nbreak", "日本", "na", "nab"]
    params = [replace(formed(choice=choices, seed=i), logit_bias={0: 3.0}) for i in range(60)]
    outputs = [o.outputs[0] for o in llm.generate(["x"] * 60, params)]
    assert {o.text for o in outputs} == set(choices)
    for output in outputs:
        ended = output.text == "na"  # the one that another continues: it needs the end-of-sequence token
        assert len(output.token_ids) == len(output.text.encode()) + ended
        assert (output.stop_reason == 0) == ended


def test_choices_may_be_many(llm: LLM) -> None:
    choices = [f"w{i:04}" for i in range(4096)]
    assert set(texts(llm, [formed(choice=choices, seed=i) for i in range(4)])) <= set(choices)


@pytest.mark.parametrize("grammar", ['start: "(" start ")" | "a"', 'root ::= "(" root ")" | "a"'], ids=["lark", "gbnf"])
def test_a_grammar_counts_its_parentheses(llm: LLM, grammar: str) -> None:
    bias = {llm.tokenizer.encode("a")[0]: 1.0}
    params = [replace(formed(200, grammar=grammar, seed=i), logit_bias=bias) for i in range(8)]
    depths = set()
    for text in texts(llm, params):
        depth = text.index("a")
        assert text == "(" * depth + "a" + ")" * depth
        depths.add(depth)
    assert len(depths) > 1


def permitted(mask: np.ndarray, vocab: int) -> set[int]:
    return set(np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab])[0].tolist())


def test_the_mask_is_every_token_that_some_match_goes_on_with(compiler: GrammarCompiler, llm: LLM) -> None:
    pattern = r"a(b|cc)*d?|x{3}y"
    for prefix in ("", "a", "ab", "acc", "ac", "abd", "x", "xx", "xxx"):
        matcher = compiler.compile(StructuredOutputsParams(regex=pattern))
        for token in llm.tokenizer.encode(prefix):
            matcher.accept(token)
            assert matcher.misfit is None
        want = {t for t in range(1, 257) if regex.fullmatch(pattern, prefix + llm.tokenizer.decode([t]), partial=True)}
        if regex.fullmatch(pattern, prefix):
            want.add(0)  # the end-of-sequence token
        assert permitted(token_masks([(matcher, ())])[0], 320) == want
        assert matcher.finished == (want == {0})


def test_drafts_are_masked_in_one_go_and_taken_back(compiler: GrammarCompiler, llm: LLM) -> None:
    form = StructuredOutputsParams(regex="ab[0-9]+|abz")
    drafts = [*llm.tokenizer.encode("ab77"), 0]
    steps = []
    walked = compiler.compile(form)
    for token in drafts:
        steps.append(permitted(token_masks([(walked, ())])[0], 320))
        walked.accept(token)
        assert walked.misfit is None
    assert walked.finished, "the end of the sequence ends the form too"
    matcher, other = compiler.compile(form), compiler.compile(StructuredOutputsParams(choice=["q"]))
    assert matcher.count_permitted(drafts) == 5
    assert matcher.count_permitted([*drafts[:2], 300, 0]) == 2
    masks = token_masks([(other, ()), (matcher, drafts[:4]), (other.fork(), ())])
    assert [permitted(m, 320) for m in masks[1:6]] == [*steps[:4], steps[4]]
    assert permitted(masks[0], 320) == permitted(masks[6], 320) == set(llm.tokenizer.encode("q"))
    walked.rollback(4)
    assert permitted(token_masks([(walked, ())])[0], 320) == steps[1]
    assert not walked.finished
    twin = walked.fork()
    walked.accept(drafts[1])
    assert walked.misfit is None
    assert permitted(token_masks([(twin, ())])[0], 320) == steps[1], "a fork stands for itself"


def test_neighbours_and_outputs_of_one_prompt_keep_their_own_forms(llm: LLM) -> None:
    free = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    alone = llm.generate(["x"], free)[0].outputs[0].token_ids
    many = SamplingParams(max_tokens=60, seed=1, n=4, structured_outputs=StructuredOutputsParams(regex="[ab]{2,9}c"))
    free_again, formed_ones = llm.generate(["x", "x"], [free, many])
    assert free_again.outputs[0].token_ids == alone
    found = [o.text for o in formed_ones.outputs]
    assert all(re.fullmatch("[ab]{2,9}c", text) for text in found)
    assert len(set(found)) > 1


def test_a_preempted_request_goes_on_in_its_form(tiny_model: Any, llm: LLM) -> None:
    params = [formed(regex=f"[a-z]{{40}}{i}", seed=i) for i in range(6)]
    want = texts(llm, params)
    block = llm.engine.runner.caches[0].values[0].nbytes * len(llm.engine.runner.caches)
    tight = LLM(tiny_model(), device="cpu", kv_cache_memory=8 * block, max_model_len=64)
    assert texts(tight, params) == want
    assert tight.engine.stats().num_preemptions > 0


def test_bans_give_way_to_the_form(compiler: GrammarCompiler) -> None:
    logits = torch.zeros(2, 320)
    logits[:, 7] = 9
    matcher = compiler.compile(StructuredOutputsParams(regex="a|b"))
    a, b = (t for t in permitted(token_masks([(matcher, ())])[0], 320))
    rows = []
    matchers = [matcher, matcher.fork()]
    for bad, own in zip((((a,),), ((a,), (b,))), matchers):
        params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="a|b"))
        rows.append(SamplingRow(params, [5], 1, frozenset(), 0, bad, own))
    assert sample(logits, rows)[0] == [b, a], "the last row's bans would leave nothing"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "exactly one of"),
        ({"regex": "a", "json_object": True}, "regex and json_object"),
        ({"choice": []}, "choice must be a list"),
        ({"choice": "ab"}, "choice must be a list"),
        ({"regex": "  "}, "regex must be a text"),
        ({"json": 3}, "json must be a JSON schema"),
    ],
)
def test_a_form_is_checked_when_it_is_made(form: dict[str, Any], message: str) -> None:
    with pytest.raises(QtoolError, match=message):
        StructuredOutputsParams(**form)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "a JSON schema is an object"),
        ({"json": {"a": {1, 2}}}, "not valid JSON"),
        ({"json": {"type": "thing"}}, "this json cannot be used"),
        ({"json": {"type": "string", "pattern": "("}}, "this json cannot be used"),
        ({"regex": "a["}, "this regex cannot be used.*unclosed character class"),
        ({"regex": "(?<=a)b"}, "look-around"),
        ({"grammar": 'start: "a" b'}, "unknown name"),
        ({"grammar": "root ::= nope"}, "Rule 'nope' not found"),
        ({"grammar": "root ::= root"}, "no text has this form"),
        ({"regex": r"[^\s\S]"}, "no text has this form"),
        ({"json": {"$ref": "#"}}, "no text has this form"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_it_is_queued(llm: LLM, form: dict[str, Any], message: str) -> None:
    with pytest.raises(QtoolError, match=message) as caught:
        llm.generate(["x", "y"], [formed(regex="a"), formed(**form)])
    assert "\n" not in str(caught.value)
    assert not llm.engine.has_unfinished()


def test_without_llguidance_everything_else_runs(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    bare = LLM(tiny_model(), device="cpu", kv_cache_memory=1 << 20)
    assert len(bare.generate(["x"], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
    with pytest.raises(QtoolError, match=r"pip install 'qtool\[structured\]'"):
        bare.generate(["x"], formed(regex="a"))


def test_a_token_that_leaves_the_form_ends_its_request_alone(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(GrammarMatcher):
        @property
        def misfit(self) -> Misfit | None:
            return Misfit("it was not to be")

    llm.engine.add_request("free", "x", SamplingParams(max_tokens=5, ignore_eos=True))
    llm.engine.add_request("bad", "x", formed(regex="abc"))
    part = llm.engine._entries["bad"].parts[0]
    assert isinstance(part.matcher, GrammarMatcher)
    part.matcher = Stubborn(part.matcher._inner, part.matcher.vocab_size)
    done = {}
    while llm.engine.has_unfinished():
        done |= {o.request_id: o.outputs[0] for o in llm.engine.step() if o.finished}
    assert done["free"].finish_reason == "length"
    assert done["bad"].finish_reason == "error"
    assert done["bad"].stop_reason == "the output left its form: it was not to be"
    assert "it was not to be" in caplog.text, "a client is told to look into the log"


# A text of as and bs in which letters 61 apart are equal is one of 2 ** 61 states: no lexer has so many.
TOO_COMPLEX = "start: T\nT: /(a|b)*/ & ~/(a|b)*a(a|b){60}b(a|b)*/ & ~/(a|b)*b(a|b){60}a(a|b)*/"


def ends(llm: LLM, requests: dict[str, SamplingParams]) -> dict[str, Any]:
    for name, params in requests.items():
        llm.engine.add_request(name, "x", params)
    done = {}
    while llm.engine.has_unfinished():
        done |= {o.request_id: o.outputs for o in llm.engine.step() if o.finished}
    llm.engine.check_integrity()
    assert llm.engine.stats().kv_blocks_used == llm.engine.stats().num_running == 0
    return done


@pytest.mark.parametrize("speculative", [None, "prompt-lookup"])
def test_a_form_that_grows_too_complex_ends_its_request_alone(tiny_model: Any, speculative: str | None) -> None:
    """Its matcher permits nothing but the end by then: that end is no answer."""
    llm = LLM(tiny_model(), device="cpu", kv_cache_memory=1 << 22, speculative=speculative)
    free = SamplingParams(max_tokens=90, seed=3, ignore_eos=True)
    (alone,) = ends(llm, {"alone": free})["alone"]
    bias = {0: -100.0}  # the end of the sequence
    hard = replace(formed(200, grammar=TOO_COMPLEX), n=2, logit_bias=bias)
    hard_too = replace(hard, n=1, min_tokens=190, ignore_eos=True)
    done = ends(llm, {"free": free, "hard": hard, "too": hard_too, "easy": formed(regex="[ab]{70}")})
    assert done["free"][0].token_ids == alone.token_ids
    assert re.fullmatch("[ab]{70}", done["easy"][0].text)
    for output in (*done["hard"], *done["too"]):
        assert output.finish_reason == "refused"
        assert re.fullmatch("[ab]{30,100}", output.text)
        assert re.fullmatch(
            r"structured_outputs: this grammar is too complex to go on after \d+ tokens of output: give a simpler one "
            r"\(lexer error: too many expressions constructed\)",
            str(output.stop_reason),
        )
    with pytest.raises(QtoolError, match=r"prompt 1: generating failed: .*this grammar is too complex"):
        llm.generate(["x", "x"], [free, hard])


def test_a_token_may_be_what_grows_too_complex(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "MOST_ITEMS", 100)
    grammar = 'start: "x" y\ny: ' + " | ".join(f'/w{i}/ "e"' for i in range(200))
    ((output,),) = ends(llm, {"hard": formed(grammar=grammar)}).values()
    assert output.finish_reason == "refused"
    assert re.search("limit 100|max is 100", str(output.stop_reason))
    assert output.text == "x"


def test_a_form_that_is_too_complex_from_the_start_is_told_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    own = llguidance.LLParserLimits(max_lexer_states=1)
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **limits: own)
    with pytest.raises(QtoolError, match=r"this grammar cannot be used: lexer error: too many states"):
        llm.generate(["x"], formed(grammar=TOO_COMPLEX.replace("60", "59")))


def test_what_others_write_is_nobodys_limit(llm: LLM) -> None:
    """One lexer grows with all outputs of a form, until one of them has used it up."""
    short = replace(formed(40, grammar=TOO_COMPLEX), logit_bias={0: -100.0})
    long = replace(short, max_tokens=200, seed=1)
    (alone,) = ends(llm, {"alone": short})["alone"]
    assert alone.finish_reason == "length"
    together = ends(llm, {"long": long, "first": short})
    later = ends(llm, {"long": long, "second": short})
    assert together["long"][0].finish_reason == later["long"][0].finish_reason == "refused"
    assert together["long"][0].token_ids == later["long"][0].token_ids
    assert together["first"][0].token_ids == later["second"][0].token_ids == alone.token_ids


def test_the_best_are_chosen_among_the_outputs_that_have_their_form(llm: LLM) -> None:
    either = 'start: "a" | "b" T\nT: ' + TOO_COMPLEX.partition("T: ")[2]
    bias = {0: -100.0, **dict.fromkeys(llm.tokenizer.encode("a"), 3.0)}
    params = replace(formed(200, grammar=either, seed=1), n=1, best_of=8, logit_bias=bias)
    ((output,),) = ends(llm, {"some": params}).values()
    assert (output.text, output.finish_reason) == ("a", "stop")


def test_a_limit_is_told_from_a_token_that_does_not_fit(compiler: GrammarCompiler, llm: LLM) -> None:
    import llguidance

    tokens = compiler._read_tokenizer(llguidance)
    twisted = "".join("ab"[i * i % 61 % 7 % 2] for i in range(61))
    wide = 'start: "x" y\ny: ' + " | ".join(f'/w{i}/ "e"' for i in range(300))
    cases: list[tuple[str, str, dict[str, int], str | None]] = [
        (TOO_COMPLEX, twisted, {"step_lexer_fuel": 50}, "too many expressions constructed"),
        (TOO_COMPLEX, twisted, {"max_lexer_states": 30}, "too many states"),
        (wide, "xw1", {"max_items_in_row": 100}, "max is 100"),
        (wide, "xw1", {"step_max_items": 100}, "Too many items"),
        (wide, "xq", {}, None),
    ]
    for grammar, text, limits, message in cases:
        inner = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=llguidance.LLParserLimits(**limits))
        matcher = GrammarMatcher(inner, tokens.vocab_size)
        for token in llm.tokenizer.encode(text):
            if matcher.misfit is None:
                token_masks([(matcher, ())])
                matcher.accept(token)
        assert matcher.misfit is not None
        assert matcher.misfit.limit == (message is not None)
        assert (message or "doesn't satisfy the grammar") in matcher.misfit.reason


@pytest.mark.model
def test_the_default_model_fills_in_a_form(default_model: Path) -> None:
    llm = LLM(default_model, device="cpu", kv_cache_memory=1 << 26, max_model_len=512)
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "millions": {"enum": list(range(1, 40))}},
        "required": ["city", "millions"],
        "additionalProperties": False,
    }
    prompts = ["The capital of France, as JSON: ", "The largest city of Japan, as JSON: "]
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    params = SamplingParams(max_tokens=80, temperature=0, structured_outputs=form)
    for output in llm.generate(prompts, params):
        jsonschema.validate(json.loads(output.outputs[0].text), schema)
