"""Metrics of several replicas in one exposition."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from adapters.metrics import Metrics
from engine.fleet.ingress.merge_metrics import merge_metrics


def test_every_sample_names_its_replica_and_every_family_is_told_once() -> None:
    texts = {}
    for replica, status in (("a", 200), ("b", 429)):
        metrics = Metrics()
        metrics.count_response("/props", status)
        metrics.observe_stage("Waiting", 0.1)
        texts[replica] = metrics.render()[0].decode()
    merged = merge_metrics(texts)
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    samples = families["rekindle_http_responses"].samples
    assert {(one.labels["replica"], one.labels["status"]) for one in samples if one.name.endswith("_total")} == {
        ("a", "200"),
        ("b", "429"),
    }
    assert all("replica" in sample.labels for family in families.values() for sample in family.samples)
    assert merged.count("# TYPE rekindle_stage_seconds histogram") == 1
    buckets = [one for one in families["rekindle_stage_seconds"].samples if one.name.endswith("_bucket")]
    assert len(buckets) == 2 * 17


def test_no_replica_makes_no_metrics() -> None:
    assert merge_metrics({}) == ""
