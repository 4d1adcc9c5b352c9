"""Figures for Prometheus: the engine's, read when asked for, and times measured in the server.

Names are those of vLLM where the meaning is the same; ``plait:`` marks what has no twin there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from plait.engine.outputs import EngineDeadError

if TYPE_CHECKING:
    from plait.engine.async_engine import AsyncEngine
    from plait.engine.stats import EngineStats
    from plait.server.course import Course
    from plait.server.desk import Order

_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5)
_LONG = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480, 960)


class ServerMetrics:
    """Histograms of what clients see, and the engine's own figures beside them.

    Args:
        folder: where several processes keep their histograms, which any of them shows as one. (The library
            asks for its name in the environment, too: PROMETHEUS_MULTIPROC_DIR, before it is imported.)
    """

    def __init__(self, model: str, folder: Path | None = None):
        self._folder = folder
        # A time of creation beside each: several processes have none in common.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.model = model
        self.registry = CollectorRegistry()
        self.first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token", _LONG)
        self.between_tokens = self._histogram("inter_token_latency_seconds", "Token to token", _SHORT)
        self.whole = self._histogram("e2e_request_latency_seconds", "Arrival to last token", _LONG)

        self.queue = self._histogram("request_queue_time_seconds", "Arrival to the first step", _LONG)
        self.prefill = self._histogram("request_prefill_time_seconds", "First step to first token", _LONG)
        self.decode = self._histogram("request_decode_time_seconds", "First token to last token", _LONG)
        self.inference = self._histogram("request_inference_time_seconds", "First step to last token", _LONG)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean of a request, behind its first token", _SHORT
        )
        self.prompt = self._histogram("request_prompt_tokens", "Tokens of prompts", _TOKENS)
        self.generation = self._histogram("request_generation_tokens", "Tokens of answers", _TOKENS)
        self.n = self._histogram("request_params_n", "Answers asked for", (1, 2, 5, 10, 20))

    def request(self, order: Order, course: Course) -> None:
        """A request to the engine is over. One that got no token says nothing about speed."""
        if course.first is None:
            return
        self.prompt.observe(len(order.prompt.token_ids))
        self.generation.observe(course.tokens)
        self.n.observe(order.params.n)
        times = {
            self.queue: course.queued,
            self.prefill: course.prefill,
            self.decode: course.decode,
            self.inference: course.inference,
        }
        for histogram, seconds in times.items():
            if seconds is not None:
                histogram.observe(seconds)
        if course.decode is not None and course.tokens > order.params.n:
            self.per_token.observe(course.decode * order.params.n / (course.tokens - order.params.n))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(model_name=self.model)

    async def page(self, engine: AsyncEngine) -> bytes:
        """The text that Prometheus scrapes. A dead engine shows as ``plait:engine_up 0``."""
        families: list[Metric] = []
        try:
            families = list(engine_families(await engine.stats(), self.model))
            up = 1
        except EngineDeadError:
            up = 0
        families.append(_gauge("plait:engine_up", "1 while the engine process runs", self.model, {(): up}))
        once = CollectorRegistry()
        once.register(_Fixed(families))
        return generate_latest(self._histograms()) + generate_latest(once)

    def _histograms(self) -> CollectorRegistry:
        if self._folder is None:
            return self.registry
        every = CollectorRegistry()
        MultiProcessCollector(every, path=str(self._folder))  # type: ignore[no-untyped-call]
        return every


class Stopwatch:
    """Times of one HTTP request: to its first token, from token to token, to its end."""

    def __init__(self, metrics: ServerMetrics):
        self._metrics = metrics
        self._start = time.monotonic()
        self._last: dict[tuple[int, int], float] = {}

    def tokens(self, answer: tuple[int, int], count: int) -> None:
        """``count`` tokens were added to ``answer`` (index of the prompt, index of the child)."""
        now = time.monotonic()
        last = self._last.get(answer)
        self._last[answer] = now
        if last is not None:
            self._metrics.between_tokens.observe((now - last) / count)
        elif len(self._last) == 1:
            self._metrics.first_token.observe(now - self._start)

    def first_token(self, seconds: float | None) -> None:
        """A whole answer's time to first token, as the engine's client saw it."""
        if seconds is not None:
            self._metrics.first_token.observe(seconds)

    def end(self) -> None:
        self._metrics.whole.observe(time.monotonic() - self._start)


class _Fixed:
    def __init__(self, families: list[Metric]):
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


Samples = dict[tuple[str, ...], float]


def _gauge(name: str, text: str, model: str, samples: Samples, labels: tuple[str, ...] = ()) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["model_name", *labels])
    for values, number in samples.items():
        family.add_metric([model, *values], number)
    return family


def _counter(name: str, text: str, model: str, samples: Samples, labels: tuple[str, ...] = ()) -> Metric:
    family = CounterMetricFamily(name, text, labels=["model_name", *labels])
    for values, number in samples.items():
        family.add_metric([model, *values], number)
    return family


def engine_families(s: EngineStats, model: str) -> Iterator[Metric]:
    """The engine's figures as metric families."""

    def gauge(name: str, text: str, number: float) -> Metric:
        return _gauge(name, text, model, {(): number})

    def counter(name: str, text: str, number: float) -> Metric:
        return _counter(name, text, model, {(): number})

    def by(name: str, text: str, label: str, numbers: dict[str, int]) -> Metric:
        samples: Samples = {(key,): float(number) for key, number in numbers.items()}
        return _counter(name, text, model, samples, (label,))

    yield gauge("vllm:num_requests_running", "Requests that run", s.running)
    yield gauge("vllm:num_requests_waiting", "Requests that wait", s.waiting)
    used = s.pages_used / s.pages_total if s.pages_total else 0.0
    yield gauge("vllm:kv_cache_usage_perc", "Share of the arena in pages of running requests, 0 to 1", used)
    yield counter("vllm:prompt_tokens", "Prompt tokens of requests admitted", s.prompt_tokens_total)
    yield counter("vllm:generation_tokens", "Tokens generated", s.generation_tokens_total)
    yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up", s.prompt_tokens_total)
    yield counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache", s.cached_tokens_total)
    yield counter("vllm:num_preemptions", "Requests preempted", s.preemptions_total)
    yield by("vllm:request_success", "Requests ended", "finished_reason", s.requests_total)

    pages: Samples = {
        ("free",): s.pages_free,
        ("cached",): s.pages_cached,
        ("used",): s.pages_used,
        ("lent",): s.pages_lent,
        ("as_states",): s.pages_as_states,
    }
    yield _gauge("plait:pages", "Pages of the arena, by state", model, pages, ("state",))
    states: Samples = {("cached",): s.states_cached, ("used",): s.states_used, ("lent",): s.states_lent}
    yield _gauge("plait:states", "Recurrent states: slots and snapshots", model, states, ("state",))
    yield by("plait:prefix_hits", "Admissions by the snapshot they restored", "kind", s.prefix_hits_total)
    yield by("plait:snapshots_taken", "Snapshots taken, by reason", "kind", s.snapshots_taken_total)
    yield counter("plait:snapshots_evicted", "Snapshots given up for memory", s.snapshots_evicted_total)
    yield counter("plait:pages_evicted", "Cached pages given up for memory", s.pages_evicted_total)
    yield by("plait:swaps", "Preempted requests, by what became of their memory", "kind", s.swaps_total)
    yield by("plait:tier_written", "Pages and snapshots written to the disk", "kind", s.tier_written_total)
    yield by("plait:tier_read", "Pages and snapshots read from the disk", "kind", s.tier_read_total)
    yield counter("plait:tier_writes_skipped", "Units that did not get there", s.tier_writes_skipped_total)
    yield counter("plait:tier_reads_failed", "Reads of lost or damaged units", s.tier_reads_failed_total)
    yield counter("plait:snapshots_skipped", "Snapshots that found no memory", s.exports_skipped_total)
    yield by("plait:copied_bytes", "Bytes copied for the cache, by reason", "kind", s.copied_bytes_total)
    yield counter("plait:computed_tokens", "Tokens computed, of prompts and answers", s.computed_tokens_total)
    yield counter("plait:recomputed_tokens", "Of these, after a preemption", s.recomputed_tokens_total)
    yield gauge("plait:leases", "Prefilled prompts kept for other engines", s.leases)
    yield gauge("plait:receiving", "Requests whose prompt is on its way here", s.receiving)
    yield gauge("plait:pages_leased", "Pages of prompts kept for other engines", s.pages_leased)
    quarantined: Samples = {("page",): s.pages_quarantined, ("state",): s.states_quarantined}
    yield _gauge("plait:quarantined", "Units of fetches not known to be over", model, quarantined, ("kind",))
    yield counter("plait:leases_begun", "Prompts offered to other engines", s.leases_total)
    yield by("plait:leases_ended", "Prompts not kept any more, by reason", "reason", s.leases_ended_total)
    yield counter("plait:prompts_received", "Prompts that came from other engines", s.prompts_received_total)
    yield counter("plait:received_tokens", "Prompt tokens among these", s.received_tokens_total)
    yield counter("plait:fetches_failed", "Prompts that did not arrive", s.fetches_failed_total)
    yield counter("plait:steps", "Steps run", s.steps_total)
    yield counter("plait:step_seconds", "Time spent in steps", s.step_seconds_total)
    yield counter("plait:step_idle_seconds", "Time between steps while there was work", s.idle_seconds_total)
    yield counter("plait:engine_cpu_seconds", "Processor time of the engine process", s.cpu_seconds_total)
    yield gauge("plait:arena_bytes", "Size of the arena", s.arena_bytes)
    yield gauge("plait:weight_bytes", "Size of the weights", s.weight_bytes)
    yield gauge("plait:memory_bytes", "Memory of the engine process", s.memory_bytes)
