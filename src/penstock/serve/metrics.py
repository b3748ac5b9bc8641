"""Prometheus metrics, under vLLM's names for metrics that vLLM has too."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from penstock.terminal.live import StageState
from penstock.zoo.optional import optional_import

_MOMENTS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters and histograms of requests and stages; `text` renders Prometheus's format.

    Example:
        metrics = Metrics()
        metrics.token(0.3, first=True)
        metrics.text()
    """

    def __init__(self) -> None:
        self._library = library = optional_import("prometheus_client", "serve")
        self._registry = registry = library.CollectorRegistry()

        def histogram(name: str, about: str) -> Any:
            return library.Histogram(name, about, buckets=_MOMENTS_S, registry=registry)

        self._first = histogram("vllm:time_to_first_token_seconds", "From a request to its first token")
        self._next = histogram("vllm:inter_token_latency_seconds", "From one token to the next")
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From a request to its end")
        self._ended = library.Counter(
            "vllm:request_success", "Finished requests, by reason", ["finished_reason"], registry=registry
        )
        self._prompt = library.Counter("vllm:prompt_tokens", "Tokens of prompts", registry=registry)
        self._tokens = library.Counter("vllm:generation_tokens", "Tokens that were generated", registry=registry)
        self._asked = library.Counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", registry=registry
        )
        self._reused = library.Counter(
            "vllm:prefix_cache_hits", "Prompt tokens taken from the prefix cache", registry=registry
        )
        self._guesses: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._stages: Callable[[], Iterable[StageState]] = tuple
        self._num_lost: Callable[[], int] = int
        registry.register(self)
        self.typical_s = 1.0  # moving average of the latency of recent requests

    def watch(self, running: Callable[[], int], waiting: Callable[[], int], slots: int) -> None:
        """Register gauges for requests in slots and in the queue."""
        for name, about, look in (
            ("vllm:num_requests_running", "Requests in slots", running),
            ("vllm:num_requests_waiting", "Requests in the queue", waiting),
            ("vllm:kv_cache_usage_perc", "Fraction of slots in use", lambda: running() / slots),
        ):
            self._library.Gauge(name, about, registry=self._registry).set_function(look)

    def watch_stages(self, stages: Callable[[], Iterable[StageState]], num_lost: Callable[[], int]) -> None:
        """Read the stages' counters, and the number of lost devices, at each scrape."""
        self._stages, self._num_lost = stages, num_lost

    def watch_guesses(self, guesses: Callable[[], tuple[int, int]]) -> None:
        """Read at each scrape the numbers of draft tokens and of accepted draft tokens."""
        self._guesses = guesses

    def token(self, seconds: float, *, first: bool) -> None:
        """Record a token and its latency since the previous token, or since its request if first."""
        (self._first if first else self._next).observe(seconds)
        self._tokens.inc()

    def ended(self, reason: str, asked_s: float, *, num_prompt: int = 0, num_reused: int = 0) -> None:
        """Record the end of a request received at `asked_s` (`time.perf_counter`)."""
        taken_s = time.perf_counter() - asked_s
        self._whole.observe(taken_s)
        self._ended.labels(reason).inc()
        self._prompt.inc(num_prompt)
        self._asked.inc(num_prompt)
        self._reused.inc(num_reused)
        self.typical_s += 0.1 * (taken_s - self.typical_s)

    def collect(self) -> Iterable[Any]:
        """Yield the stages' counters; called by prometheus-client at each scrape."""
        core = optional_import("prometheus_client.core", "serve")
        busy = core.CounterMetricFamily("penstock:stage_compute_seconds", "Computing", labels=["stage"])
        done = core.CounterMetricFamily("penstock:stage_microbatches", "Microbatches computed", labels=["stage"])
        sent = core.CounterMetricFamily("penstock:stage_sent_bytes", "Sent over links", labels=["stage"])
        for stage in self._stages():
            busy.add_metric([stage.name], stage.busy_s)
            done.add_metric([stage.name], stage.computed)
            sent.add_metric([stage.name], stage.sent_bytes)
        lost = core.CounterMetricFamily("penstock:devices_lost", "Devices lost while serving", value=self._num_lost())
        made, right = self._guesses()
        guessed = core.CounterMetricFamily("vllm:spec_decode_num_draft_tokens", "Draft tokens", value=made)
        accepted = core.CounterMetricFamily("vllm:spec_decode_num_accepted_tokens", "Accepted drafts", value=right)
        return busy, done, sent, lost, guessed, accepted

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        written: bytes = self._library.generate_latest(self._registry)
        return written
