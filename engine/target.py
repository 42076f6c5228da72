"""From options to a loaded target: the only place that constructs the model side."""

from __future__ import annotations


class Refusal(Exception):
    """What a person asked for cannot be done; the message is all they need to know."""
