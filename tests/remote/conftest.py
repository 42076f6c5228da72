"""Models that these tests load have given rates."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def nothing_is_timed(rates_are_given: None) -> None:
    """Let each module have them."""
