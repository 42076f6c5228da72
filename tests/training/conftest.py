"""Real source to make tasks of, and the shipped tokenizer: quicker than reading the library and training one."""

from __future__ import annotations

import inspect
import json.decoder
import textwrap
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import adapters
from training.words import Source

DEMO = Path(adapters.__file__).parent / "demo"


@pytest.fixture(scope="session")
def source() -> Source:
    return Source((inspect.getsource(json.decoder), inspect.getsource(textwrap)))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))
