"""The models that these tests load have given rates, as the servers that are forked do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def rates_are_given() -> Iterator[None]:
    from tests.given_rates import given_rates  # noqa: PLC0415 - it imports torch, which collecting does without

    with given_rates():
        yield
