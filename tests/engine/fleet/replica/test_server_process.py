"""The server of a replica as a child process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adapters.store.files.private_folder import FolderInUse, PrivateFolder
from engine.fleet.replica.server_process import ServerTask, start_server
from engine.replica_server import ORPHANED
from engine.settings.user_error import UserError

TASK = b'{"words": ["serve"], "drain_s": 60}'
SOON = b'{"words": ["serve"], "drain_s": 0}'
STUB = """
import signal, sys
import engine.replica_server as server

def serve(words):
    {}
    print(*words, flush=True)
    {}

server.main = serve
server.run()
"""


def start_stub(first: str, then: str, task: bytes, kept_open: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """Start the process of a server with these statements instead of serving. Wait until the first one is done."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUB.format(first, then)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=kept_open,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(task + b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"serve\n"
    return process


def lose_actor(process: subprocess.Popen[bytes]) -> None:
    """Close standard input, as the kernel does when the actor dies, however it dies."""
    assert process.stdin is not None
    process.stdin.close()


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(UserError, match="no such folder"):
        start_server(ServerTask(["serve", "/nowhere/at/all"], 10))


def test_a_server_drains_when_the_actor_that_started_it_dies() -> None:
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"
    with start_stub(block, "return signal.sigwait([signal.SIGTERM]) - signal.SIGTERM", TASK) as process:
        lose_actor(process)
        assert process.wait(30) == 0


def test_a_server_that_does_not_drain_ends_within_its_limit() -> None:
    with start_stub("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "signal.pause()", SOON) as process:
        lose_actor(process)
        assert process.wait(30) == ORPHANED


def test_a_folder_stays_claimed_while_the_server_of_a_dead_actor_drains(tmp_path: Path) -> None:
    claim = PrivateFolder.open(tmp_path / "replica-0")
    with start_stub("pass", "signal.pause()", TASK, claim.descriptors) as process:
        claim.close()
        with pytest.raises(FolderInUse):
            PrivateFolder.open(tmp_path / "replica-0")
        lose_actor(process)
        process.wait(30)
        PrivateFolder.open(tmp_path / "replica-0").close()
