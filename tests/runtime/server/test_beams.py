"""`use_beam_search` over HTTP gives what LLM.beam_search gives, whatever else the engine does meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.runtime.beam_search import BeamSearchParams
from qtool.runtime.llm import LLM
from qtool.runtime.llm_engine import LLMEngine


@pytest.fixture(scope="module")
def url(tiny_model: Any, serve: Any) -> Iterator[str]:
    engine = LLMEngine(tiny_model(), device="cpu", dtype="float32", max_num_seqs=8, kv_cache_memory=1 << 22)
    with serve(engine) as address:
        yield f"{address}/v1"


def test_outputs_are_those_of_the_offline_search(url: str, tiny_model: Any) -> None:
    prompts = [[5, 6, 7], list(range(1, 45))]
    llm = LLM(tiny_model(), device="cpu", dtype="float32", kv_cache_memory=1 << 22)
    want = llm.beam_search(prompts, BeamSearchParams(3, 9, length_penalty=0.5, logprobs=1))
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    def search() -> Any:
        return client.completions.create(
            model="tiny", prompt=prompts, n=3, max_tokens=9, temperature=0, logprobs=1,
            extra_body={"use_beam_search": True, "length_penalty": 0.5},
        )  # fmt: skip

    def sample() -> Any:
        return client.completions.create(model="tiny", prompt="hello", max_tokens=30, n=4, seed=3)

    with ThreadPoolExecutor(3) as pool:
        first, other, second = [f.result() for f in (pool.submit(search), pool.submit(sample), pool.submit(search))]
    for found in (first, second):
        assert [c.text for c in found.choices] == [o.text for w in want for o in w.outputs]
        assert [c.finish_reason for c in found.choices] == [o.finish_reason for w in want for o in w.outputs]
        for choice, output in zip(found.choices, (o for w in want for o in w.outputs)):
            assert sum(choice.logprobs.token_logprobs) == pytest.approx(output.cumulative_logprob, abs=1e-4)
        assert found.usage.completion_tokens == sum(len(o.token_ids) for w in want for o in w.outputs)
    assert len(other.choices) == 4
    health = httpx.get(url.removesuffix("/v1") + "/health")
    assert health.status_code == 200


def test_a_beam_on_which_the_engine_fails_ends_its_own_search_as_any_request(
    tiny_model: Any, serve: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = LLMEngine(folder, device="cpu", dtype="float32", max_num_seqs=8, kv_cache_memory=1 << 22)
    with serve(engine) as address:
        for searching in (True, False):
            body = {"prompt": [5, 7], "max_tokens": 2, "n": 2, "use_beam_search": searching}
            answer = httpx.post(f"{address}/v1/completions", json=body)
            assert answer.status_code == 500
            assert answer.json()["error"]["message"].startswith("the engine failed on this request")
        whole = {"prompt": [5, 6], "max_tokens": 1, "n": 2, "use_beam_search": True}
        assert httpx.post(f"{address}/v1/completions", json=whole).status_code == 200


def test_a_search_that_cannot_fit_is_refused(url: str) -> None:
    body = {"prompt": [1] * 250, "max_tokens": 7, "n": 2, "use_beam_search": True}
    assert httpx.post(f"{url}/completions", json=body).status_code == 400
