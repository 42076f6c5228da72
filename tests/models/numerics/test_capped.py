"""The promise on processors of other kinds: the suite's exact part under other instruction sets, each in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.importing import importing

ROOT = Path(__file__).parents[3]
CAPS = {
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "ATEN_CPU_CAPABILITY": "avx512"},
}
EXACT = ["tests/models", "tests/device", "tests/e2e/test_exact.py", "tests/e2e/test_speculation.py"]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cap", CAPS)
def test_the_exact_part_of_the_suite_holds_under_an_instruction_set(cap: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *EXACT],
        cwd=ROOT,
        env={**os.environ, **CAPS[cap], **importing(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
