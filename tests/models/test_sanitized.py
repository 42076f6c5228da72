"""The library in C under sanitizers: no read or write beside what it was given, nothing that C leaves undefined."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hatch_build
from tests.importing import importing

SANITIZERS = "address,undefined"
SECONDS = 120


def preloaded() -> str:
    """What Python itself was not linked with: the sanitizers' own libraries."""
    found = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return ":".join(found)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_calls_of_all_shapes_stay_within_what_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(hatch_build.__file__).parent
    folder = tmp_path / hatch_build.FOLDER
    shutil.copytree(root / hatch_build.FOLDER, folder, ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setenv("CC", f"gcc -O1 -g -fsanitize={SANITIZERS} -fno-sanitize-recover=all")
    flags = tuple(flag for flag in hatch_build.FLAGS if flag != "-O3")  # that takes minutes more
    monkeypatch.setattr(hatch_build, "FLAGS", flags)
    assert hatch_build.compiled(tmp_path)
    environment = {
        **os.environ,
        **importing(root),
        "LD_PRELOAD": preloaded(),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",  # an interpreter leaves plenty
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    words = [sys.executable, "-m", "tests.models.native_fuzz", str(folder), str(SECONDS)]
    ran = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert not ran.returncode, (folder / "seed").read_text() + ran.stderr[-5000:]
    cases = int(ran.stdout.split()[0])
    assert cases > 100
