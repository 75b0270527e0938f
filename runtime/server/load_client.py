"""The load generator's other end: the same workload against any OpenAI-compatible server, streamed over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from qtool.quant.errors import QtoolError
from qtool.quant.progress import ProgressFn, silent
from qtool.runtime.bench import BenchRequest, BenchResult, RequestTiming, summarize


def served_model(url: str, api_key: str | None) -> dict[str, Any]:
    """The first entry of the server's model list: `id`, and `max_model_len` where the server says so.

    Raises:
        QtoolError: nothing answers there, or it is no OpenAI-compatible server.
    """
    try:
        response = httpx.get(f"{url}/v1/models", headers=_headers(api_key), timeout=10)
        response.raise_for_status()
        card: dict[str, Any] = response.json()["data"][0]
        card["id"]
    except httpx.HTTPStatusError as error:
        raise QtoolError(f"{url}/v1/models answered {error.response.status_code}; is --api-key right?") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise QtoolError(f"no server answers at {url} ({error}); start one with `qtool serve MODEL`") from error
    except (ValueError, LookupError, TypeError) as error:
        raise QtoolError(f"{url}/v1/models is no OpenAI model list; is --url the server's base URL?") from error
    return card


def run_url(
    url: str,
    model: str,
    workload: Sequence[BenchRequest],
    *,
    concurrency: int | None = None,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    progress: ProgressFn = silent,
) -> BenchResult:
    """Send the workload to `url` and measure at the client. Closed or open loop as in `bench.run_engine`."""
    return asyncio.run(_run(url, model, workload, concurrency, api_key, timeout_s, progress))


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


async def _run(
    url: str,
    model: str,
    workload: Sequence[BenchRequest],
    concurrency: int | None,
    api_key: str | None,
    timeout_s: float,
    progress: ProgressFn,
) -> BenchResult:
    gate = asyncio.Semaphore(concurrency) if concurrency is not None else None
    done = 0
    label = f"concurrency {concurrency}" if concurrency else "open loop"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(headers=_headers(api_key), timeout=timeout_s, limits=limits) as client:
        start = time.perf_counter()

        async def send(request: BenchRequest) -> RequestTiming:
            nonlocal done
            if gate is None:
                due = start + request.arrival
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                timing = await _send(client, url, model, request, due)
            else:
                async with gate:
                    timing = await _send(client, url, model, request, time.perf_counter())
            done += 1
            progress(label, done, len(workload))
            return timing

        timings = await asyncio.gather(*map(send, workload))
        return summarize(timings, time.perf_counter() - start, concurrency=concurrency)


async def _send(
    client: httpx.AsyncClient, url: str, model: str, request: BenchRequest, arrival: float
) -> RequestTiming:
    """One streamed completion; tokens are counted by the server's usage, times by the chunks as they come."""
    body = {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    deliveries: list[float] = []
    usage: dict[str, int] | None = None
    error: str | None = None
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                error = f"HTTP {response.status_code}: {(await response.aread())[:300].decode(errors='replace')}"
            else:
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        error = str(event["error"].get("message"))
                    if event.get("choices"):
                        deliveries.append(time.perf_counter())
                    usage = event.get("usage") or usage
    except (httpx.HTTPError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    if error is None and (usage is None or not deliveries):
        error = "the stream ended without tokens or usage"
    usage = usage or {}
    prompt_tokens, output_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    if error is None and output_tokens != request.output_len:
        error = f"the server generated {output_tokens} of {request.output_len} tokens"
    return RequestTiming(arrival, tuple(deliveries), prompt_tokens, output_tokens, error)
