"""Parses JSON from outside, and refuses it before parsing where it would need far more memory than its text.

A number or a string takes up to about ten times the memory of its characters, so a limit on the length of the text
bounds them. An empty list takes sixty bytes for its two characters. So lists and objects are counted.
"""

from __future__ import annotations

import json
import re
from typing import Any

STRING_PATTERN = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def loads(text: str, most: int) -> Any:
    """Parse a JSON text. Raises ValueError, or RecursionError where it is nested too deeply.

    most: the greatest number of lists and objects together.
    """
    if count_containers(text) > most and count_containers(STRING_PATTERN.sub("", text)) > most:
        raise ValueError(f"more than {most} lists and objects")
    return json.loads(text)


def count_containers(text: str) -> int:
    return text.count("[") + text.count("{")
