"""Tests of the threads of the compiled library (pool.h): every loop is done once, whichever thread calls, sleeps, or is
in a child of a fork.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from adapters.models.kernels.cpu.native.products import NativeProducts
from adapters.models.kernels.functions.seeded import make_generator
from tests.child_code import check_code
from tests.models.checkpoints import same_bits

CALLERS, CALLS = 3, 400


@pytest.fixture
def four_threads() -> object:
    torch.set_num_threads(max(4, before := torch.get_num_threads()))
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
def test_callers_at_the_same_time_each_get_their_own_loop_done(native_code: object) -> None:
    """More callers and threads than processors, and calls with and without a pause before them."""
    own = NativeProducts(native_code, native_code.level)  # type: ignore[arg-type,attr-defined]
    generator = make_generator(1)
    weight = own.pack(torch.randn(400, 64, generator=generator))
    rows = [torch.randn(2, 64, generator=generator) for _ in range(CALLERS)]
    expected = [own.multiply(x, weight) for x in rows]

    def call(caller: int) -> int:
        wrong = 0
        for number in range(CALLS):
            if number % 3 == 0:
                own.compiled.code.rekindle_expect_loop(1000 * (number % 7))
            wrong += not same_bits(own.multiply(rows[caller], weight), expected[caller])
        return wrong

    with ThreadPoolExecutor(CALLERS) as callers:
        assert list(callers.map(call, range(CALLERS))) == [0] * CALLERS


FORKING = """
import os
import torch
from adapters.models.kernels.cpu.native.native_library import find_library
from adapters.models.kernels.cpu.native.products import NativeProducts

torch.set_num_threads(4)
compiled = find_library()
own = NativeProducts(compiled, compiled.level)
weight = own.pack(torch.randn(400, 64))
x = torch.randn(2, 64)
expected = own.multiply(x, weight)
for _ in range(3):
    child = os.fork()
    if not child:
        os._exit(0 if all(torch.equal(own.multiply(x, weight), expected) for _ in range(20)) else 1)
    assert torch.equal(own.multiply(x, weight), expected)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_child_of_a_fork_starts_threads_of_its_own() -> None:
    check_code(FORKING, 110, "-W", "ignore")
