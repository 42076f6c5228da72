"""Tests of the lines that `fleet` prints when a fleet is ready, and when it is not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.fleet import deploy_fleet
from engine.fleet.fleet_options import FleetOptions
from engine.settings.options import build_options
from engine.settings.user_error import UserError

FAILED = "Deploying application rekindle failed: Failed to update the deployments ['replica']."
TRACEBACK = """The deployment failed to start 3 times in a row. See controller logs for details. Error:
ray::ServeReplica:rekindle:replica.initialize_and_get_metadata() (pid=7, ip=127.0.0.1)
  File "/engine/fleet/replica/server_process.py", line 92, in start_server
    raise UserError(line)
{}
"""


@pytest.mark.parametrize(
    ("options", "has_key"), [({}, False), ({"api_key": ("k",)}, True), ({"api_key_file": Path("/keys")}, True)]
)
def test_the_command_to_paste_has_a_key_where_one_is_needed(
    options: dict[str, Any], has_key: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    context = SimpleNamespace(gcs_address="127.0.0.1:1")
    monkeypatch.setattr(deploy_fleet.ray, "get_runtime_context", lambda: context)
    deploy_fleet.announce_fleet(build_options(**options), "2", 1.0)
    assert ("-H 'Authorization: Bearer KEY'" in capsys.readouterr().out) == has_key


@pytest.mark.parametrize(
    ("last_line", "cause"),
    [
        ("engine.settings.user_error.UserError: /models/x: no such folder", "/models/x: no such folder"),
        ("MemoryError: 3 GiB", "MemoryError: 3 GiB"),
    ],
)
def test_a_fleet_that_does_not_start_says_why(last_line: str, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve's exception names only deployments. Its status has what their constructors raised."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(FAILED)

    deployments = {
        "replica": SimpleNamespace(message=TRACEBACK.format(last_line)),
        "ingress": SimpleNamespace(message=""),
    }
    status = SimpleNamespace(applications={deploy_fleet.NAME: SimpleNamespace(deployments=deployments)})
    monkeypatch.setattr(deploy_fleet, "build_fleet", lambda _: None)
    monkeypatch.setattr(deploy_fleet.serve, "run", refuse)
    monkeypatch.setattr(deploy_fleet.serve, "status", lambda: status)
    with pytest.raises(UserError) as refused:
        deploy_fleet.deploy({})
    assert str(refused.value) == f"the replicas do not start: {cause}"
    status.applications.clear()
    with pytest.raises(UserError, match=r"Failed to update the deployments \['replica'\]"):
        deploy_fleet.deploy({})


def test_the_proxies_of_a_cluster_listen_where_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    for name in ("init", "shutdown", "cluster_resources"):
        monkeypatch.setattr(deploy_fleet.ray, name, lambda **_: {})
    monkeypatch.setattr(deploy_fleet.serve, "start", lambda **options: started.append(options))
    monkeypatch.setattr(deploy_fleet, "deploy", lambda _: None)
    assert deploy_fleet.deploy_to_cluster(build_options(host="10.0.0.7", port=81), FleetOptions(address="auto")) == 0
    assert started == [{"http_options": {"host": "10.0.0.7", "port": 81}}]
