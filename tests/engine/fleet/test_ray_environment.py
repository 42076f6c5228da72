"""The variables that Ray reads: where its processes listen."""

from __future__ import annotations

import os

import pytest

from engine.fleet.haproxy_script import BINARY_PATH
from engine.fleet.ray_environment import ENVIRONMENT, HAPROXY_PORTS, LOOPBACK_ONLY, prepare_environment

NAMES = (LOOPBACK_ONLY[0], *ENVIRONMENT, *HAPROXY_PORTS, BINARY_PATH)


@pytest.mark.parametrize(
    ("address", "is_loopback", "is_local"),
    [("", True, True), ("127.0.0.1:6379", True, False), ("ray-head:6379", False, False), ("auto", False, False)],
)
def test_a_local_ray_listens_on_loopback_and_is_found_there(
    address: str, is_loopback: bool, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    prepare_environment(address)
    assert (LOOPBACK_ONLY[0] in os.environ, "RAY_SERVE_ENABLE_HA_PROXY" in os.environ) == (is_loopback, is_local)
    assert len({os.environ[name] for name in HAPROXY_PORTS if is_local}) == 2 * is_local


def test_what_is_set_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOOPBACK_ONLY[0], "1")
    prepare_environment("localhost:6379")
    assert os.environ[LOOPBACK_ONLY[0]] == "1"
