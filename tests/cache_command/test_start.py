"""Tests that commands without a model start without torch, which takes seconds to import, and without numpy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pairs import one_in
from tests.store.kit import disk_store, save, settled

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from engine.__main__ import main
assert main(sys.argv[1:]) == 0
print("imported:", *({"torch", "numpy", "tokenizers", "transformers"} & set(sys.modules)))
"""


@one_in(2, "words")
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["serve", "--help"],
        ["--version"],
        ["completion", "bash", "--show"],
        ["cache", "ls"],
        ["cache", "verify"],
    ],
)
def test_what_needs_no_model_imports_no_library_for_one(words: list[str], tmp_path: Path) -> None:
    if words[0] == "cache":
        store = disk_store(tmp_path / "kv")
        save(store, tuple(range(64)))
        settled(store)
        store.close()
        words = [*words, str(tmp_path / "kv")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported:", done.stdout
