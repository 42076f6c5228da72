"""No test waits for ever."""

from __future__ import annotations

import anyio
import pytest

from tests.conftest import given_up, limit_of


async def test_a_test_that_waits_for_ever_is_cancelled(request):
    assert limit_of(request.node) == float(request.config.getini("timeout")) - 10
    with pytest.raises(TimeoutError):
        await given_up(anyio.sleep_forever, 0.01)()


@pytest.mark.timeout(0)
def test_one_without_a_limit_has_none(request):
    assert limit_of(request.node) is None
