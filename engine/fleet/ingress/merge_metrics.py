"""Merges the metrics of all replicas into one exposition, in which each sample names its replica."""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import define, field
from prometheus_client import CollectorRegistry, Counter

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.+)")
REPLICA = "replica"


def make_prefill_counter(registry: CollectorRegistry) -> Counter:
    """Return the metric of prompts that a router has had read by another replica than the one that answers."""
    meaning = "Prompts that another replica was to read, by its id and by outcome; all but `read` were read locally"
    return Counter("rekindle_fleet_remote_prefills", meaning, ["reader", "outcome"], registry=registry)


def make_repeat_counter(registry: CollectorRegistry) -> Counter:
    """Return the metric of requests that were repeated."""
    meaning = "Requests of a fleet that were sent to another replica before their client had a token"
    return Counter("rekindle_fleet_repeats", meaning, ["reason"], registry=registry)


@define
class MetricFamily:
    """The comments of one metric, and its samples of all replicas."""

    comments: dict[str, str] = field(factory=dict)
    samples: list[str] = field(factory=list)


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Return one exposition in Prometheus' text format. texts: that of each replica by its name."""
    families = dict[str, MetricFamily]()
    for replica, text in texts.items():
        family = MetricFamily()
        for line in text.splitlines():
            if line.startswith("# "):
                _, kind, name, *_ = line.split(" ", 3)
                family = families.setdefault(name, MetricFamily())
                family.comments.setdefault(kind, line)
            elif sample := SAMPLE.fullmatch(line):
                labels = f'{REPLICA}="{replica}"' + (f",{sample[2]}" if sample[2] else "")
                family.samples.append(f"{sample[1]}{{{labels}}} {sample[3]}")
    return "".join(f"{line}\n" for family in families.values() for line in (*family.comments.values(), *family.samples))
