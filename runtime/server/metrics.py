"""What the server counts, under the names that dashboards for vLLM expect, with a prefix of our own.

A request here is one prompt: a body with three prompts counts three times. Requests that their client gave up count
in `request_success_total{finished_reason="abort"}` alone and in no histogram of whole requests, so that the
histograms' counts equal the number of answers that clients got.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from qtool.runtime.engine.core import EngineStats
from qtool.runtime.engine.params import RequestOutput
from qtool.runtime.server.engine_client import StepReport

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
_ITERATION = tuple(2**power for power in range(15))


class Metrics:
    """Counters of one server, in a registry of their own.

    Args:
        model_name: the value of the `model_name` label.
        baseline: the engine's totals before the first request; what it did until then (a warm-up) does not count.
        prefix: in front of every name: `qtool_`, or `vllm:` for dashboards made for vLLM.
    """

    def __init__(self, model_name: str, baseline: EngineStats, prefix: str = "qtool_") -> None:
        self.registry = CollectorRegistry()
        self._seen: dict[str, tuple[int, float]] = {}  # running request → its tokens so far, and since when

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(prefix + name, text, ["model_name"], registry=self.registry).labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(prefix + name, text, ["model_name"], registry=self.registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(prefix + name, text, ["model_name"], buckets=buckets, registry=self.registry)
            return metric.labels(model_name)

        self.running = gauge("num_requests_running", "Requests that hold a place in the batch.")
        self.waiting = gauge("num_requests_waiting", "Requests that wait for a place in the batch.")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of the KV-cache blocks in use, 0 to 1.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of the requests that got their first token.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.preemptions = counter("num_preemptions", "Times that a running request was put back into the queue.")
        self.swaps = counter("num_swaps", "Preemptions whose KV-cache blocks were kept in host memory.")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.drafts = counter("spec_decode_num_drafts", "Times that tokens were proposed for a request.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Tokens proposed.")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Tokens proposed and accepted.")
        self.restarts = counter("engine_restarts", "Times that an engine's process took the place of one that died.")
        self.hangs = counter("engine_hangs", "Times that an engine finished no step for too long, and was ended.")
        finished = Counter(
            prefix + "request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.finished = {r: finished.labels(model_name, r) for r in ("stop", "length", "abort")}
        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN)
        self.itl = histogram("inter_token_latency_seconds", "From one token of a request to the next.", _PER_TOKEN)
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after a request's first.", _PER_TOKEN
        )
        self.queue_time = histogram("request_queue_time_seconds", "From arrival to the first step.", _REQUEST)
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _REQUEST
        )
        self.decode_time = histogram("request_decode_time_seconds", "From the first token to the last.", _REQUEST)
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST)
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_length = histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self.iteration = histogram("iteration_tokens_total", "Tokens sampled in one step of the engine.", _ITERATION)
        self._totals = baseline

    def on_step(self, report: StepReport) -> None:
        """Count what one step brought."""
        self.set_gauges(report.stats)
        last, self._totals = self._totals, report.stats
        self.preemptions.inc(self._totals.num_preemptions - last.num_preemptions)
        self.swaps.inc(self._totals.num_swaps - last.num_swaps)
        self.prefix_queries.inc(self._totals.prefix_cache_queries - last.prefix_cache_queries)
        self.prefix_hits.inc(self._totals.prefix_cache_hits - last.prefix_cache_hits)
        self.drafts.inc(self._totals.num_drafts - last.num_drafts)
        self.draft_tokens.inc(self._totals.num_draft_tokens - last.num_draft_tokens)
        self.accepted_tokens.inc(self._totals.num_accepted_tokens - last.num_accepted_tokens)
        sampled = sum(self._count(output, report.time) for output in report.outputs)
        if sampled:
            self.iteration.observe(sampled)

    def set_gauges(self, stats: EngineStats) -> None:
        """Show the engine as it stands; between steps, aborts change it too."""
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.kv_usage.set(stats.kv_cache_usage)

    def on_abort(self, ids: Sequence[str]) -> None:
        """Count requests that their clients gave up, or that died with the engine."""
        self.finished["abort"].inc(len(ids))
        for request_id in ids:
            self._seen.pop(request_id, None)

    def on_restart(self, stats: EngineStats) -> None:
        """An engine with counts of its own took the place of one that died."""
        self.restarts.inc()
        self._totals = stats
        self.set_gauges(stats)

    def on_hang(self, reason: str) -> None:
        """An engine that hung was ended."""
        self.hangs.inc()

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def _count(self, output: RequestOutput, now: float) -> int:
        """Count one request's progress; returns its new tokens."""
        total = sum(len(choice.token_ids) for choice in output.outputs)
        before, since = self._seen.get(output.request_id, (0, now))
        if total > before:
            self.generation_tokens.inc(total - before)
            if before:
                self.itl.observe(now - since)
            else:
                self.prompt_tokens.inc(len(output.prompt_token_ids))
                self.ttft.observe(now - output.metrics.arrival)
            self._seen[output.request_id] = (total, now)
        if output.finished:
            self._seen.pop(output.request_id, None)
            self._count_finished(output, total, now)
        return total - before

    def _count_finished(self, output: RequestOutput, total: int, now: float) -> None:
        reasons = {choice.finish_reason for choice in output.outputs}
        if not reasons <= {"stop", "length"}:
            self.finished["abort"].inc()
            return
        self.finished["length" if "length" in reasons else "stop"].inc()
        times = output.metrics
        end = times.finished if times.finished is not None else now
        self.e2e.observe(end - times.arrival)
        self.prompt_length.observe(len(output.prompt_token_ids))
        self.output_length.observe(total)
        if times.scheduled is None or times.first_token is None:
            return
        self.queue_time.observe(times.scheduled - times.arrival)
        self.prefill_time.observe(times.first_token - times.scheduled)
        self.decode_time.observe(end - times.first_token)
        longest = max(len(choice.token_ids) for choice in output.outputs)
        if longest > 1:
            self.tpot.observe((end - times.first_token) / (longest - 1))
