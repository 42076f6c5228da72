"""JSON from outside: refused before it is parsed where it would become far more memory than it is text.

Numbers and texts take up to some ten times the memory of their characters, so a limit on a text's length bounds them.
An empty list takes sixty bytes for its two characters, and one is as quickly written as the next: lists and objects are
counted.
"""

from __future__ import annotations

import json
import re
from typing import Any

TEXTS = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def loads(text: str, most: int) -> Any:
    """Raises ValueError, or RecursionError where lists are nested too deeply. most: of lists and objects together."""
    if opened(text) > most and opened(TEXTS.sub("", text)) > most:
        raise ValueError(f"more than {most} lists and objects")
    return json.loads(text)


def opened(text: str) -> int:
    return text.count("[") + text.count("{")
