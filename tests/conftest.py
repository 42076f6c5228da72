"""What every test shares: the async backend, the cores, and which tests this machine and this run can do."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import engine  # noqa: F401 - before torch: how its threads wait

# Before torch is imported, here and by what a test starts: threads of several workers that wait for each other on the
# same cores take longer than one each. Tests of what threads do to numbers say how many they want.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """For tensors: what several of them do to numbers has to be seen where a worker has one core, too."""
    import torch  # noqa: PLC0415 - as below

    torch.set_num_threads(max(2, before := torch.get_num_threads()))
    yield
    torch.set_num_threads(before)


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
