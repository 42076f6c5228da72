"""Norms, biases and gates of the GPU's kernels, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("check", ["check_norms", "check_biases", "check_gates"])
def test_rows_are_those_of_operations_one_by_one(check):
    pytest.importorskip("triton")
    code = f"from tests.models.kernels.interpreted_rows import {check}; {check}()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=environment, timeout=100)
