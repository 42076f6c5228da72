"""One small trained tokenizer for all tests of a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.text.tokenizer import Tokenizer
from tests.text import small


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)
