"""The server of a replica as a child process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.fleet.replica.server_process import start_server
from engine.settings.user_error import UserError


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(UserError, match="no such folder"):
        start_server(["serve", "/nowhere/at/all"])


def test_a_server_ends_with_the_actor_that_started_it() -> None:
    """The actor's end of standard input closes when the actor dies, however it dies."""
    code = "import engine.replica_server as one; one.main = lambda words: __import__('time').sleep(60); one.run()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b'["serve"]\n')
        process.stdin.close()
        assert process.wait(30) == 3
