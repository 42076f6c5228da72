"""Tests of which form of a kernel a launch gets: the one that was chosen for launches that agree in everything it
depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import define, field

from adapters.models.kernels.triton_launch import launch, withhold_launches


@define(eq=False)
class FakeJit:
    """A kernel like Triton's own: with a grid it chooses a form and launches it, and a form launches itself."""

    arg_names = ("x", "count", "scale", "BLOCK")
    chosen: list[tuple[tuple[int, ...], tuple[Any, ...]]] = field(factory=list)
    again: list[tuple[tuple[int, ...], tuple[Any, ...]]] = field(factory=list)
    aside: bool = False

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def choose(*args: Any, BLOCK: int, num_warps: int) -> Any:  # noqa: N803 - as kernels call theirs
            assert num_warps == 4
            self.chosen.append((grid, (*args, BLOCK)))
            form = FakeForm(self)
            return SimpleNamespace(result=lambda: form) if self.aside else form

        return choose


@define(eq=False)
class FakeForm:
    of: FakeJit

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.of.again.append((grid, args))


def test_what_is_alike_is_chosen_once_and_launched_with_its_own_arguments() -> None:
    kernel, first, second = FakeJit(), torch.zeros(8), torch.ones(8)
    for x, scale, grid in ((first, 0.5, (2,)), (second, 0.25, (3, 2))):
        launch(kernel, grid, x, 8, scale, BLOCK=16, num_warps=4)
    assert [(grid, args[1:]) for grid, args in kernel.chosen] == [((2,), (8, 0.5, 16))]
    ((grid, (x, *rest)),) = kernel.again
    assert (grid, rest) == ((3, 2, 1), [8, 0.25, 16])
    assert x is second


def test_a_form_that_is_still_compiled_aside_is_waited_for() -> None:
    """Newer Tritons give what stands for it, which cannot be launched itself."""
    kernel = FakeJit(aside=True)
    for _ in range(2):
        launch(kernel, (1,), torch.zeros(8), 8, 0.5, BLOCK=16, num_warps=4)
    assert (len(kernel.chosen), len(kernel.again)) == (1, 1)


@pytest.mark.parametrize(
    ("x", "count", "block"),
    [
        (torch.zeros(9)[1:], 8, 16),  # another address's multiple
        (torch.zeros(8, dtype=torch.bfloat16), 8, 16),
        (torch.zeros(8), 1, 16),
        (torch.zeros(8), True, 16),
        (torch.zeros(8), 8, 32),
    ],
)
def test_what_differs_in_anything_a_form_may_depend_on_is_chosen_anew(x: torch.Tensor, count: int, block: int) -> None:
    kernel = FakeJit()
    launch(kernel, (1,), torch.zeros(8), 8, 0.5, BLOCK=16, num_warps=4)
    launch(kernel, (1,), x, count, 0.5, BLOCK=block, num_warps=4)
    assert len(kernel.chosen) == 2
    assert not kernel.again


@pytest.mark.cuda
def test_a_kernel_gives_the_same_wherever_its_tensors_begin() -> None:
    """A form for addresses that are multiples of 16 bytes reads so many at once: elsewhere it would end in a fault."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from adapters.models.kernels.cuda.kernels import TritonKernels  # noqa: PLC0415 - needs Triton, so a GPU build

    kernels, device = TritonKernels(torch.device("cuda", 0)), torch.device("cuda", 0)
    width = 1024
    weight, rows = torch.rand(width, device=device).bfloat16(), torch.rand(6, width, device=device).bfloat16()
    expected = kernels.add_norm(rows.clone(), rows, weight, 1e-6)
    for offset in (0, 1, 4, 8, 0, 1):
        memory = torch.zeros(rows.numel() + 8, device=device, dtype=torch.bfloat16)
        moved = memory[offset : offset + rows.numel()].view_as(rows)
        moved.copy_(rows)
        assert torch.equal(kernels.add_norm(moved.clone(), moved, weight, 1e-6), expected)


def test_withheld_launches_only_look_for_forms() -> None:
    looked = list[tuple[tuple[int, ...], tuple[Any, ...]]]()

    @define(eq=False)
    class Looked(FakeJit):
        def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
            looked.append((grid, (*args, options["BLOCK"])))
            if options["BLOCK"] is None:
                raise TypeError("not serializable")

    kernel, x = Looked(), torch.zeros(8)
    with withhold_launches():
        for block in (4, 4, None):
            launch(kernel, (2,), x, 3, 0.5, BLOCK=block, num_warps=4)
    assert [grid for grid, _ in looked] == [(2,)] * 3
    assert not kernel.chosen
    assert not kernel.again
    launch(kernel, (2,), x, 3, 0.5, BLOCK=4, num_warps=4)
    assert len(kernel.chosen) == 1
    assert len(looked) == 3
