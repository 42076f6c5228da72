"""Plans of attention: rows of several slots share a tile where their slots begin with the same pages.

With a window, a tile has no splits before it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.parametrize("check", ["check_shared_tiles", "check_windows"])
def test_every_split_of_every_row_is_computed_once_whether_or_not_rows_share_tiles(check):
    pytest.importorskip("triton")
    code = f"from tests.models.kernels.interpreted_tiles import {check}; {check}()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=environment, timeout=500)
