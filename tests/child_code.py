"""Runs code of a test in a process of its own, and fails unless all of it ran and its assertions held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REACHED = "the end of the code is reached"


def check_code(code: str, timeout_s: float, *flags: str, **environment: str) -> None:
    """Run `code` in the root of this tree, by an interpreter with these flags.

    The last thing that runs is an assertion that fails. So code that returns early is noticed, and so is an interpreter
    that leaves assertions out.
    """
    words = [sys.executable, *flags, "-c", f"{code}\nassert False, {REACHED!r}"]
    variables = {**os.environ, **environment}
    done = subprocess.run(
        words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 1, done.stderr[-4000:]
    assert done.stderr.rstrip().endswith(f"AssertionError: {REACHED}"), done.stderr[-4000:]


def check_interpreted(code: str, timeout_s: float) -> None:
    """Run code with kernels in Triton's interpreter. The test is skipped where there is no Triton."""
    pytest.importorskip("triton", reason="comes with CUDA builds of torch")
    check_code(code, timeout_s, TRITON_INTERPRET="1")
