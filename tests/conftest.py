"""What every test shares: the async backend, and which tests this machine and this run can do."""

from __future__ import annotations

import pytest

import engine  # noqa: F401 - before torch: how its threads wait


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cuda")]  # keywords have the names of folders, too
    if marked and not has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    for item in items:
        if item.get_closest_marker("long") and "long" not in (config.getoption("markexpr") or ""):
            item.add_marker(pytest.mark.skip(reason="long: run with -m long"))


def has_cuda() -> bool:
    import torch  # noqa: PLC0415 - most runs of a few pure tests never need it

    return torch.cuda.is_available()
