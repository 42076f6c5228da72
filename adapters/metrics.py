"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from effects.ports import Closed

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counts what happens. Never labelled by anything that a client chose."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._stages = Histogram(
            "rekindle_stage_seconds",
            "Time that requests spent in a state",
            ["state"],
            buckets=SECONDS,
            registry=registry,
        )
        self._requests = Counter("rekindle_requests", "Requests by how they ended", ["finish"], registry=registry)
        self._tokens = Counter("rekindle_tokens", "Tokens by kind", ["kind"], registry=registry)
        self._hits = Counter("rekindle_prefix_hits", "Requests with restored tokens", ["tier"], registry=registry)
        self._misses = Counter("rekindle_prefix_misses", "Requests that missed tokens", ["reason"], registry=registry)
        self._rounds = Counter("rekindle_rounds", "Decoding rounds", registry=registry)
        self._drafted = Counter("rekindle_draft_tokens", "Drafted tokens", ["outcome"], registry=registry)
        self._queue = Gauge("rekindle_queue_length", "Requests that wait for a slot", registry=registry)
        self._slots = Gauge("rekindle_slots", "Slots by use", ["use"], registry=registry)
        self._shown = (-1, -1, -1)
        self._http = Counter("rekindle_http_responses", "HTTP responses", ["path", "status"], registry=registry)

    def stage(self, state: str, seconds: float) -> None:
        """A request has left a state."""
        self._stages.labels(state).observe(seconds)

    def closed(self, closed: Closed) -> None:
        """A request has ended: once for each, by the engine."""
        report = closed.report
        self._requests.labels(closed.finish).inc()
        for kind, count in (
            ("prompt", report.prompt_tokens),
            ("cached", report.restored_tokens),
            ("completion", report.completion_tokens),
        ):
            self._tokens.labels(kind).inc(count)
        if report.restored_tokens:
            self._hits.labels(report.tier).inc()
        if report.miss:
            self._misses.labels(report.miss.partition(":")[0]).inc()
        self._rounds.inc(report.rounds)
        self._drafted.labels("accepted").inc(report.accepted)
        self._drafted.labels("rejected").inc(max(0, report.proposed - report.accepted))

    def gauges(self, queue: int, slots_busy: int, slots: int) -> None:
        """Called after every event: says nothing where nothing changed."""
        if (queue, slots_busy, slots) == self._shown:
            return
        self._shown = (queue, slots_busy, slots)
        self._queue.set(queue)
        self._slots.labels("busy").set(slots_busy)
        self._slots.labels("free").set(slots - slots_busy)

    def http(self, path: str, status: int) -> None:
        """A response was begun; status 0: the client left before."""
        self._http.labels(path, str(status)).inc()

    def render(self) -> tuple[bytes, str]:
        """(text exposition, its content type)"""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
