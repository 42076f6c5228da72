"""The files in deploy/ know what a server has: metrics, labels and their values, options, paths."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.__main__ import main
from engine.settings.config_file import parse_values
from tests.docs.reference import every_metric

DEPLOY = Path(__file__).parents[2] / "deploy"
SELECTED = re.compile(r"\b((?:rekindle|up)\w*)(?:\{([^}]*)\})?")
OWN_LABELS = {"job", "instance", "le"}  # Prometheus'


def expressions() -> Iterator[str]:
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def labels_of() -> dict[str, set[str]]:
    """Return the labels of every sample that a server may expose, by the sample's name."""
    found: dict[str, set[str]] = {"up": set()}
    for one in every_metric().registry.collect():
        for sample in one.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_dashboard_and_alerts_ask_for_what_is_exposed() -> None:
    known = labels_of()
    asked = list(expressions())
    assert len(asked) > 20
    for expression in asked:
        inside = re.sub(r'"[^"]*"', '""', expression)
        for metric, matchers in SELECTED.findall(inside):
            if f'="{metric}"' in expression:
                continue
            assert metric in known, f"{expression}: there is no {metric}"
            labels = set(re.findall(r"(\w+)\s*[=!]", matchers))
            assert labels <= known[metric] | OWN_LABELS, f"{expression}: labels of {metric}"
        for grouped in re.findall(r"\bby \(([^)]*)\)", inside):
            allowed = set().union(*(known[metric] for metric, _ in SELECTED.findall(inside)))
            assert {label.strip() for label in grouped.split(",")} <= allowed | OWN_LABELS, expression


def test_values_that_are_asked_for_by_name_are_those_that_are_counted() -> None:
    counted = {
        (label, value)
        for one in every_metric().registry.collect()
        for sample in one.samples
        for label, value in sample.labels.items()
    }
    asked = {pair for each in expressions() for pair in re.findall(r'(kind|outcome|use)="(\w+)"', each)}
    assert asked <= counted
    assert len(asked) >= 4


def test_panels_are_told_apart_and_do_not_overlap() -> None:
    panels: list[dict[str, Any]] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set[tuple[int, int]]()
    for place in (panel["gridPos"] for panel in panels):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_service_and_its_options_belong_together() -> None:
    unit = (DEPLOY / "rekindle.service").read_text()
    options = tomllib.loads((DEPLOY / "rekindle.toml").read_text())
    found = parse_values({name.replace("-", "_"): value for name, value in options.items()})
    assert str(found.http.api_key_file) == "/run/credentials/rekindle.service/keys"
    assert "LoadCredential=keys:" in unit
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert stop is not None
    assert int(stop[1]) > found.http.grace + 1, "systemd would kill what still drains"
    assert str(found.cache.kv_cache_dir).startswith("/var/cache/rekindle/")
    assert re.search(r"^CacheDirectory=rekindle$", unit, re.MULTILINE)


def test_a_proxy_waits_as_long_and_takes_as_much_as_the_server() -> None:
    text, defaults = (DEPLOY / "nginx.conf").read_text(), parse_values({})
    assert f"client_max_body_size {defaults.http.max_body}m;" in text
    assert f"proxy_read_timeout {defaults.http.request_timeout:.0f}s;" in text


def test_the_image_is_built_of_what_a_wheel_is_made_of() -> None:
    root = DEPLOY.parent
    copied = set(re.findall(r"^COPY (?!--)(.*) \S+$", (root / "Containerfile").read_text(), re.MULTILINE))
    names = {name for line in copied for name in line.split()}
    sent = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    built = tomllib.loads((root / "pyproject.toml").read_text())
    wheel = built["tool"]["hatch"]["build"]["targets"]["wheel"]
    wanted = {
        *wheel["packages"],
        wheel["hooks"]["custom"]["path"],
        built["project"]["readme"],
        *built["project"]["license-files"],
    }
    assert wanted <= names
    assert names == sent
    assert all((root / name).exists() for name in names)


def test_the_example_for_kubernetes_has_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    service = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    words = ["/models/Qwen3-4B", "--device", "cuda", "--slots", "8", "--replicas", "4", "--allow-host", "*"]
    words += ["--api-key-file", "/keys/rekindle", "--kv-cache-dir", "/cache/rekindle"]
    words += ["--kv-shared-tier", "s3://rekindle/prompts", "--yaml"]
    assert main(["fleet", *words]) == 0
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == yaml.safe_load(capsys.readouterr().out)
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert sum(group["replicas"] for group in groups) == 4
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_pods_on_kubernetes_may_use_what_their_options_name() -> None:
    """The image's user reads the key by its group, makes the cache folder itself, and gets the store's key."""
    spec = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())["spec"]
    options = yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"]["options"]
    cluster = spec["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert len(groups) == 2
    for pod in (group["template"]["spec"] for group in groups):
        assert pod["securityContext"]["fsGroup"]
        (container,) = pod["containers"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert options["kv_cache_dir"] not in mounts, "everybody may write to the top of an emptyDir"
        for name in ("model", "api_key_file", "kv_cache_dir"):
            assert any(options[name].startswith(f"{mount}/") for mount in mounts), name
        assert [one["secretRef"]["name"] for one in container["envFrom"]] == ["rekindle-store"]
    assert options["kv_shared_tier"].startswith("s3://")
    assert parse_values(options).shared_tier.kv_shared_tier == options["kv_shared_tier"]


def test_the_image_of_a_fleet_has_what_kubernetes_probes_call(tmp_path: Path) -> None:
    """The command that installs packages is carried out with an `apt-get` that only prints its words."""
    final = (DEPLOY.parent / "Containerfile").read_text().rpartition("FROM ")[2]
    command = re.search(r"^RUN (packages=(?:.*\\\n)*.*)$", final, re.MULTILINE)
    assert command is not None
    fake = tmp_path / "apt-get"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o700)
    script = command[1].replace("rm -rf /var/lib/apt/lists/*", "true")

    def install(**arguments: str) -> set[str]:
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **arguments}
        printed = subprocess.run(["/bin/sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
        return set(printed.stdout.split()) - {"update", "install", "--yes", "--no-install-recommends"}

    assert install(TORCH_INDEX="x", EXTRAS="") == set()
    assert install(TORCH_INDEX="x", EXTRAS="fleet,shared") == {"wget"}
    assert install(TORCH_INDEX="", EXTRAS="fleet") == {"gcc", "libc6-dev", "wget"}
