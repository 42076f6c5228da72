"""Tests of the library in C under sanitizers: it reads and writes only what it was given, and does nothing that C
leaves undefined.
"""

from __future__ import annotations

import os
import re
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
    """Return the libraries of the sanitizers, with which Python itself was not linked."""
    found = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return ":".join(found)


# Tests of calls that take a whole model, with the library of another folder.
STEPS = """
import sys
from pathlib import Path
import pytest
from adapters.models.kernels.cpu.native import native_library
native_library.FOLDER = Path(sys.argv[1])
sys.exit(pytest.main(["-q", "-s", "-p", "no:cacheprovider", "tests/device/decode/test_native_decode.py"]))
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library, compiled with sanitizers."""
    root, home = Path(hatch_build.__file__).parent, tmp_path_factory.mktemp("sanitized")
    folder = home / hatch_build.FOLDER
    shutil.copytree(root / hatch_build.FOLDER, folder, ignore=shutil.ignore_patterns("*.so"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", f"gcc -O1 -g -fsanitize={SANITIZERS} -fno-sanitize-recover=all")
        flags = tuple(flag for flag in hatch_build.FLAGS if flag != "-O3")  # that takes minutes more
        patch.setattr(hatch_build, "FLAGS", flags)
        assert hatch_build.compiled(home)
    return folder


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python that has the sanitizers' own libraries."""
    root = Path(hatch_build.__file__).parent
    environment = {
        **os.environ,
        **importing(root),
        "LD_PRELOAD": preloaded(),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",  # an interpreter leaves plenty
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    words = (sys.executable, *words)
    return subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_calls_of_all_shapes_stay_within_what_they_are_given(sanitized: Path) -> None:
    done = ran("-m", "tests.models.native_fuzz", str(sanitized), str(SECONDS))
    assert not done.returncode, (sanitized / "seed").read_text() + done.stderr[-5000:]
    cases = int(done.stdout.split()[0])
    assert cases > 100


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_so_do_decode_steps_in_one_call(sanitized: Path) -> None:
    done = ran("-c", STEPS, str(sanitized))
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"^[1-9][0-9]+ passed in ", done.stdout, re.MULTILINE), done.stdout[-3000:]
