"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from attrs import frozen
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from adapters.cache_figures import RestoreTotals, StoreFigures, TierFigures
from effects.ports import Closed, Stage

BUCKET_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The counters of one server. No label has a value that a client chose."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._stages = Histogram(
            "rekindle_stage_seconds",
            "Time that requests spent in a state",
            ["state"],
            buckets=BUCKET_SECONDS,
            registry=registry,
        )
        self._requests = Counter("rekindle_requests", "Requests by how they ended", ["finish"], registry=registry)
        self._tokens = Counter("rekindle_tokens", "Tokens by kind", ["kind"], registry=registry)
        self._hits = Counter("rekindle_prefix_hits", "Requests with restored tokens", ["tier"], registry=registry)
        self._misses = Counter(
            "rekindle_prefix_misses", "Requests of which not all tokens were found", ["reason"], registry=registry
        )
        self._decode_steps = Counter("rekindle_rounds", "Decode steps", registry=registry)
        self._drafted = Counter(
            "rekindle_draft_tokens", "Tokens that drafts proposed, by outcome", ["outcome"], registry=registry
        )
        self._queue = Gauge("rekindle_queue_length", "Requests that wait for a slot", registry=registry)
        self._slots = Gauge("rekindle_slots", "Slots by use", ["use"], registry=registry)
        self._shown = (-1, -1, -1)
        self._http = Counter("rekindle_http_responses", "HTTP responses", ["path", "status"], registry=registry)

    def watch_cache(self, figures: Callable[[], StoreFigures]) -> None:
        """Expose the prefix cache's own figures (`full_cache` of /props) from now on."""
        self.registry.register(CacheFigures(figures))

    def watch_pages(self, figures: Callable[[], Mapping[str, int]]) -> None:
        """Expose the pages of KV memory (`kv_pages` of /props) from now on, where slots share pages."""
        self.registry.register(PageFigures(figures))

    def watch_damage(self, figures: Callable[[], Mapping[str, int]]) -> None:
        """Expose the number of damaged files from now on, by kind."""
        self.registry.register(DamageFigures(figures))

    def watch_turns(self, figures: Callable[[], Mapping[str, int]]) -> None:
        """Expose from now on how many answers are remembered, and how often their tokens were used again."""
        self.registry.register(TurnFigures(figures))

    def watch_listeners(self, listeners: Callable[[], int]) -> None:
        """Expose from now on how many pages follow the server's status."""
        gauge = Gauge("rekindle_status_listeners", "Pages that follow the server's status", registry=self.registry)
        gauge.set_function(listeners)

    def watch_shards(self, figures: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Expose from now on the time of shards in other processes, by their layers."""
        self.registry.register(ShardFigures(figures))

    def observe_stage(self, stage: Stage, seconds: float) -> None:
        """Note the time of a request in a stage that it has left."""
        self._stages.labels(stage).observe(seconds)

    def count_closed(self, closed: Closed) -> None:
        """Count a request that has ended. The engine calls this once for each request."""
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
        self._decode_steps.inc(report.decode_steps)
        self._drafted.labels("accepted").inc(report.accepted)
        self._drafted.labels("rejected").inc(max(0, report.proposed - report.accepted))

    def set_gauges(self, queue: int, slots_busy: int, slots: int) -> None:
        """Set the gauges of slots and of the queue. Called after every event, so it is cheap if nothing changed."""
        if (queue, slots_busy, slots) == self._shown:
            return
        self._shown = (queue, slots_busy, slots)
        self._queue.set(queue)
        self._slots.labels("busy").set(slots_busy)
        self._slots.labels("free").set(slots - slots_busy)

    def count_response(self, path: str, status: int) -> None:
        """Count a response that was begun. status 0: the client left before."""
        self._http.labels(path, str(status)).inc()

    def render(self) -> tuple[bytes, str]:
        """Return the text exposition and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


# Names and meanings of the counters of the disk tier. Its figures have the same names.
DISK_COUNTERS = {
    "quarantined": "Damaged cache files that were set aside",
    "outdated": "Cache files of an earlier format that were removed",
    "newer": "Cache files of a later format that were left alone",
    "rebuilt": "Journals and lists of recent prompts that were torn or damaged and were replaced",
    "write_errors": "Writes to the cache folder that failed",
    "read_errors": "Reads from the cache folder that failed",
    "dropped_writes": "Entries that were not written, because the queue or the budget was full",
    "written_bytes": "Bytes written to the cache folder",
    "read_bytes": "Bytes read from the cache folder",
}
# The same of the shared tier.
SHARED_COUNTERS = {
    "written": "Runs written to the shared store",
    "already_there": "Runs that another server had written at the same moment",
    "collected": "Runs that this server removed from the shared store",
    "damaged": "Objects of the shared store that were not what they should be and are not used",
    "other_format": "Objects of the shared store in the format of another version",
    "outages": "Times that the shared store was lost",
    "write_errors": "Writes to the shared store that failed",
    "read_errors": "Reads from the shared store that failed",
    "dropped_outage": "Runs that were not written because the shared store was lost",
    "dropped_queue_full": "Runs that were not written because too many waited",
    "dropped_no_room": "Runs that were not written because the shared store was over its budget",
    "written_bytes": "Bytes written to the shared store",
    "read_bytes": "Bytes read from the shared store",
}


@frozen(eq=False)
class CacheFigures(Collector):
    """Collects the prefix cache's figures when metrics are scraped, so that nothing is counted twice."""

    figures: Callable[[], StoreFigures]

    def describe(self) -> Iterator[Metric]:
        """Nothing: else registering would ask for the figures."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        figures = self.figures()
        disk = figures.top
        tiers = {**figures.others, **({"disk": disk} if disk.budget else {})}
        for name, meaning in (
            ("bytes", "Bytes kept"),
            ("budget", "Bytes that may be kept"),
            ("entries", "Entries kept"),
        ):
            unit = "_bytes" if name == "budget" else ""
            gauge = GaugeMetricFamily(f"rekindle_cache_{name}{unit}", meaning, labels=["tier"])
            for tier, tier_figures in tiers.items():
                gauge.add_metric([tier], getattr(tier_figures, name))
            yield gauge
        evictions = {tier: tier_figures.evictions for tier, tier_figures in tiers.items()}
        yield make_counter("rekindle_cache_evictions", "Entries that were evicted", "tier", evictions)
        yield make_counter("rekindle_cache_hits", "Lookups that found more than the device had", "tier", figures.hits)
        yield make_counter(
            "rekindle_cache_misses", "Lookups that found no more than the device had", "reason", figures.misses
        )
        yield from iterate_restore_metrics(figures.restores)
        for name, meaning in DISK_COUNTERS.items():
            if name in disk.more:
                yield CounterMetricFamily(f"rekindle_cache_{name}", meaning, value=disk.get_count(name))
        yield CounterMetricFamily(
            "rekindle_cache_dropped_rows",
            "Rows of the model that snapshots did not keep for lack of memory or time",
            value=figures.dropped_rows,
        )
        yield CounterMetricFamily(
            "rekindle_cache_dropped_draft_rows",
            "Rows of the draft that snapshots did not keep for lack of memory or time, or because it had lost them",
            value=figures.dropped_draft_rows,
        )
        if "shared" in figures.others:
            yield from iterate_shared_metrics(figures.others["shared"])
        if "queued_bytes" in disk.more:
            yield GaugeMetricFamily(
                "rekindle_cache_queued_bytes", "Bytes that wait to be written", value=disk.get_count("queued_bytes")
            )


@frozen(eq=False)
class PageFigures(Collector):
    """Collects the pages of KV memory that all slots share."""

    figures: Callable[[], Mapping[str, int]]

    def describe(self) -> Iterator[Metric]:
        """Nothing: else registering would ask for the figures."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        figures = self.figures()
        gauge = GaugeMetricFamily("rekindle_kv_pages", "Pages of KV memory that slots share, by use", labels=["use"])
        for use in ("busy", "idle", "free"):
            if use in figures:
                gauge.add_metric([use], figures[use])
        yield gauge


@frozen(eq=False)
class DamageFigures(Collector):
    """Collects the number of damaged files, of every kind of file that is kept between starts."""

    figures: Callable[[], Mapping[str, int]]

    def describe(self) -> Iterator[Metric]:
        """Nothing: else registering would ask for the figures."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        yield make_counter("rekindle_damaged_files", "Kept files that were found damaged", "what", self.figures())


@frozen(eq=False)
class TurnFigures(Collector):
    """Collects how many answers are remembered by their tokens, and their use in later prompts."""

    figures: Callable[[], Mapping[str, int]]

    def describe(self) -> Iterator[Metric]:
        """Nothing: else registering would ask for the figures."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        figures = self.figures()
        yield GaugeMetricFamily("rekindle_remembered_turns", "Answers whose tokens are kept", value=figures["turns"])
        yield GaugeMetricFamily(
            "rekindle_remembered_bytes", "Bytes of answers whose tokens are kept", value=figures["bytes"]
        )
        for name, meaning in (
            ("prompts", "Prompts with tokens that stand as they were generated"),
            ("tokens", "Prompt tokens that stand as they were generated"),
        ):
            yield CounterMetricFamily(f"rekindle_remembered_{name}", meaning, value=figures[name])


@frozen(eq=False)
class ShardFigures(Collector):
    """Collects the time of forwards in other processes."""

    figures: Callable[[], Mapping[str, Mapping[str, float]]]

    def describe(self) -> Iterator[Metric]:
        """Nothing: else registering would ask for the figures."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        figures = self.figures()
        for name, meaning in (
            ("hop", "Time of forwards in other processes spent on everything else"),
            ("compute", "Time of forwards in other processes spent on computing there"),
        ):
            seconds = SummaryMetricFamily(f"rekindle_shard_{name}_seconds", meaning, labels=["layers"])
            for layers, shard_figures in figures.items():
                seconds.add_metric(
                    [layers], count_value=int(shard_figures["hops"]), sum_value=shard_figures[f"{name}_seconds"]
                )
            yield seconds
        restarts = {layers: shard_figures["restarts"] for layers, shard_figures in figures.items()}
        yield make_counter("rekindle_shard_restarts", "Times that a lost shard was reached again", "layers", restarts)


def iterate_shared_metrics(figures: TierFigures) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "rekindle_shared_usable", "1 while the shared store can be used", value=figures.get_count("usable")
    )
    for name, meaning in SHARED_COUNTERS.items():
        yield CounterMetricFamily(f"rekindle_shared_{name}", meaning, value=figures.get_count(name))
    yield GaugeMetricFamily(
        "rekindle_shared_queued_bytes",
        "Bytes that wait to be written to the shared store",
        value=figures.get_count("queued_bytes"),
    )


def make_counter(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    counter = CounterMetricFamily(name, meaning, labels=[label])
    for value, count in values.items():
        counter.add_metric([value], count)
    return counter


def iterate_restore_metrics(by_tier: Mapping[str, RestoreTotals]) -> Iterator[Metric]:
    seconds = SummaryMetricFamily(
        "rekindle_cache_restore_seconds", "Time to restore rows to the device", labels=["tier"]
    )
    for tier, load_figures in by_tier.items():
        seconds.add_metric([tier], count_value=load_figures.count, sum_value=load_figures.seconds)
    yield seconds
    loaded = {tier: load_figures.bytes for tier, load_figures in by_tier.items()}
    yield make_counter("rekindle_cache_restored_bytes", "Bytes restored to the device", "tier", loaded)
