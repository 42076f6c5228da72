"""Instructions that a process executes, counted by callgrind, a tool of valgrind: other programs do not disturb them.

The process runs under `callgrind_command`, at a fiftieth of its speed while instructions are counted.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path


def callgrind_command(folder: Path) -> list[str]:
    """Return the words that come before a command which counts its instructions. folder: empty, for its counts."""
    return ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder / 'count'}"]


def count_instructions(folder: Path, work: Callable[[], object]) -> int:
    """Return the instructions of this process, on all threads, while it does some work.

    folder: as in `callgrind_command`, under which this process has to run.
    """
    control("--instr=on")
    control("--zero")
    work()
    control("--dump")
    counts = sorted(folder.iterdir())
    text = "\n".join(file.read_text() for file in counts)
    for file in counts:
        file.unlink()
    return sum(map(int, re.findall(r"^totals: (\d+)", text, re.MULTILINE)))


def control(order: str) -> None:
    """Give an order to the callgrind that this process runs under, and wait until it is carried out."""
    subprocess.run(["callgrind_control", order, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)
