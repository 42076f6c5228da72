"""Trials of one product: which row counts give each row the same bits, and how long they take.

The numbers are made so that each sum cancels: what is left is rounding, and any other order of adding shows in nearly
every element.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from attrs import define, field
from torch import Tensor

from adapters.checkpoint.packed_matrix import TABLES, PackedMatrix, StepLayout
from adapters.models.kernels.multiplier import ExactAttention, Multiplier, dtype_name
from adapters.models.kernels.product_list import NATIVE, PACKED, SCORES, TILE, Heads, Weight
from adapters.models.kernels.seeded import seeded

_MOST = 1 << 22  # random elements of a weight; a larger one repeats them
_RUNS = 4
# Seconds that a product which is not the library's costs a step besides: it takes its layer out of the one call for all
# of them (`Kernels.at_once`), and a layer's ten ways into C and back are shared by its four products.
_APART = 30e-6
_WHOLE = {2: torch.int16, 4: torch.int32}
# Row counts that are no bucket: where a step's layers are one call of the library, its padded rows are passed over.
BETWEEN = (1, 2, 3, 5, 7, 11, 13)


@define(eq=False)
class Group:
    """Row counts that agree. reference: every row of the trial's x, as they all compute it."""

    rows: list[int]
    reference: Tensor


@define(eq=False)
class Trial:
    """One product, tried with rows of x `[C, K]`. way: how it is computed. threads: under which it may be asked for."""

    name: str
    way: str
    x: Tensor
    threads: tuple[int, ...]
    multiply: Callable[[Tensor], Tensor]
    checks: int = 0
    failures: list[str] = field(factory=list)

    def whole(self, count: int, threads: int) -> Tensor:
        torch.set_num_threads(threads)
        return torch.cat([self.multiply(part) for part in torch.split(self.x, count)])

    def same(self, found: Tensor, expected: Tensor) -> bool:
        self.checks += 1
        whole = _WHOLE[found.itemsize]  # whole elements, wherever they lie: by the byte it took most of a proof's time
        return torch.equal(found.view(whole), expected.view(whole))

    def agrees(self, count: int, reference: Tensor, threads: int) -> str | None:
        """None, or how a row of such a product differs from its reference."""
        torch.set_num_threads(threads)
        x, last = self.x, len(self.x) - count
        for at in sorted({0, last}):
            if not self.same(self.multiply(x[at : at + count]), reference[at : at + count]):
                return f"{count} rows differ from {{}} ({threads} threads)"
        moved, expected = rolled(x, count), rolled(reference, count)
        if not self.same(self.multiply(moved), expected):
            return f"{count} rows: where a row stands changes it ({threads} threads)"
        for others, said in ((0.0, "its neighbours"), (float("nan"), "a neighbour that is not a number")):
            for at, row in ((0, len(x) - 1), (count - 1, 0)):
                beside = torch.full_like(x[:count], others)
                beside[at] = x[row]
                if not self.same(self.multiply(beside)[at], reference[row]):
                    return f"{count} rows: {said} change a row ({threads} threads)"
        return None

    def groups(self, counts: Sequence[int]) -> list[Group]:
        """Each count in the first group that it agrees with; one that does not even agree with itself in none."""
        found: list[Group] = []
        for count in counts:
            home = next((group for group in found if self.differs(count, group.reference) is None), None)
            if home is not None:
                home.rows.append(count)
                continue
            own = self.whole(count, self.threads[0])
            why = self.differs(count, own)
            if why is None:
                found.append(Group([count], own))
            else:
                self.failures.append(f"{self.name}: {why.format('themselves')}")
        return found if self.way not in {NATIVE, PACKED} or self.agrees_between(found, counts) else []

    def agrees_between(self, found: Sequence[Group], counts: Sequence[int]) -> bool:
        """Do all counts agree, and those that are no bucket with them?"""
        if [one.rows for one in found] != [[*counts]]:
            self.failures += [f"{self.name}: {one.rows} rows differ from {found[0].rows}" for one in found[1:]]
            return False
        between = (count for count in BETWEEN if count < max(counts))
        whys = [why for count in between if (why := self.differs(count, found[0].reference)) is not None]
        self.failures += [f"{self.name}: {why.format(found[0].rows[0])}" for why in whys]
        return not whys

    def differs(self, count: int, reference: Tensor) -> str | None:
        return next((why for one in self.threads if (why := self.agrees(count, reference, one)) is not None), None)

    def seconds(self, count: int, threads: int) -> float:
        torch.set_num_threads(threads)
        part, best = self.x[:count], float("inf")
        for _ in range(_RUNS):
            start = time.perf_counter()
            self.multiply(part)
            best = min(best, time.perf_counter() - start)
        return best

    def of_a_step(self, count: int, threads: int) -> float:
        """Seconds that a step of so many rows takes for it."""
        return self.seconds(count, threads) + (0 if self.way in {NATIVE, PACKED} else _APART)


@define(eq=False)
class ScoresTrial(Trial):
    """Queries times keys: besides the row count, how many keys there are changes from step to step."""

    keys: Tensor = field(kw_only=True)
    spans: tuple[int, ...] = field(kw_only=True)
    product: Callable[[Tensor, Tensor], Tensor] = field(kw_only=True)
    least: int = field(kw_only=True)

    def agrees(self, count: int, reference: Tensor, threads: int) -> str | None:
        why = super().agrees(count, reference, threads)
        if why is not None:
            return why
        moved, expected = rolled(self.x, count), rolled(reference, count)
        for span in self.spans:
            if count <= max(self.least, SCORES // span):
                found = self.product(moved, self.keys[:span])
                if not self.same(found, expected[:, :span]):
                    return f"{count} rows over {span} keys differ from {{}} over {len(self.keys)} ({threads} threads)"
        return None


@define(eq=False)
class ValuesTrial(Trial):
    """Weights times values: fewer keys than `terms` must give what the missing ones with weight zero give."""

    values: Tensor = field(kw_only=True)  # [K, hd]
    product: Callable[[Tensor, Tensor], Tensor] = field(kw_only=True)

    def agrees(self, count: int, reference: Tensor, threads: int) -> str | None:
        why = super().agrees(count, reference, threads)
        if why is not None:
            return why
        for terms in range(TILE, len(self.values), TILE):
            short = self.x[:count, :terms].contiguous()
            padded = torch.zeros_like(self.x[:count])
            padded[:, :terms] = short
            if not self.same(self.product(short, self.values[:terms]), self.multiply(padded)):
                return f"{count} rows: {terms} values and {len(self.values)} differ ({threads} threads)"
        return None


def weight_trial(kernels: Multiplier, weight: Weight, rows: int, way: str, threads: tuple[int, ...]) -> Trial:
    """rows: the most that come at once."""
    name = f"{weight.inputs} to {weight.outputs} in {way}"
    x, w = cancelling(rows, weight.outputs, weight.inputs, kernels.rows_in(way))
    packed = kernels.reorder(w, way)
    if not weight.gated:
        return Trial(name, way, x, threads, lambda some: kernels.multiply(some, packed))
    up = kernels.reorder(w.roll(1, 0), way)
    return Trial(f"gated {name}", way, x, threads, lambda some: kernels.multiply_gated(some, packed, up))


def packed_trial(kernels: Multiplier, weight: Weight, rows: int, threads: tuple[int, ...]) -> Trial | None:
    """Of a weight that has a layout; None where nothing multiplies it as it is."""
    layout, name = weight.layout, f"{weight.inputs} to {weight.outputs} in {weight.layout}"
    assert layout is not None
    x, matrix = cancelling_packed((rows, weight.outputs, weight.inputs), layout, kernels.rows_in(NATIVE))
    packed = kernels.pack_steps(matrix)
    if packed is None:
        return None
    if not weight.gated:
        return Trial(name, PACKED, x, threads, lambda some: kernels.multiply(some, packed))
    up = kernels.pack_steps(matrix.mapped(lambda one: one.roll(1, 0)))
    return Trial(f"gated {name}", PACKED, x, threads, lambda some: kernels.multiply_gated(some, packed, up))


def scores_trial(
    multiply: Callable[[Tensor, Tensor], Tensor],
    heads: Heads,
    rows: tuple[int, int],
    found: tuple[int, ...],
    threads: tuple[int, ...],
) -> ScoresTrial:
    """rows: the most of queries, and the least that any span allows. found: spans."""
    x, keys = cancelling(rows[0], heads.keys, heads.size, torch.float32)
    return ScoresTrial(
        f"scores of heads of {heads.size}",
        dtype_name(x.dtype),
        x,
        threads,
        lambda some: multiply(some, keys),
        keys=keys,
        spans=found,
        product=multiply,
        least=rows[1],
    )


def values_trial(
    multiply: Callable[[Tensor, Tensor], Tensor],
    heads: Heads,
    rows: int,
    terms: int,
    dtype: torch.dtype,
    threads: tuple[int, ...],
) -> ValuesTrial:
    x, w = cancelling(rows, heads.size, terms, dtype)
    values, name = w.t().contiguous(), f"{terms} values of heads of {heads.size} in {dtype_name(dtype)}"

    def product(some: Tensor, those: Tensor) -> Tensor:
        return multiply(some, those.t())

    return ValuesTrial(
        name, dtype_name(dtype), x, threads, lambda some: product(some, values), values=values, product=product
    )


def batched_trial(rows: int, shape: tuple[int, int, int], threads: tuple[int, ...]) -> Trial:
    """All heads multiply the same rows, each with a weight of its own. shape: heads, terms of a sum, outputs."""
    heads, terms, outputs = shape
    x, w = cancelling(rows, heads * outputs, terms, torch.float32)
    weights = w.view(heads, outputs, terms).transpose(1, 2).contiguous()

    def multiply(some: Tensor) -> Tensor:
        return torch.bmm(some.expand(heads, -1, -1).contiguous(), weights).transpose(0, 1).flatten(1)

    return Trial(f"{heads} times {terms} to {outputs}", dtype_name(x.dtype), x, threads, multiply)


def attention_trial(
    own: ExactAttention, dtype: torch.dtype, shape: tuple[int, int], rows: int, threads: tuple[int, ...]
) -> Trial:
    """Attention of our own by `rows` rows, all of which see the same keys: some of the first of its tiles and of the
    last, and all between. What rows see otherwise is tried layer by layer (`probe.py`). shape: queries to a key head,
    and their size. dtype: of keys and values; what is compared is never rounded to it.
    """
    group, size = shape
    generator, keys = seeded(size), 2 * TILE
    x = torch.randn(rows, group * size, generator=generator) * size**-0.25
    k, v = (torch.randn(2, 1, 1, keys, size, generator=generator) * size**-0.25).to(dtype)
    slots, exact = torch.zeros(rows, dtype=torch.int64), own.with_output(torch.float32)
    low, high = slots + 3, slots + keys - 131

    def attend(some: Tensor) -> Tensor:
        seen = low[: len(some)], high[: len(some)]
        return exact.attend(some.view(-1, 1, group, size), slots[: len(some)], seen, k, v)

    return Trial(f"attention of heads of {size}", NATIVE, x, threads, attend)


def cancelling(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `[rows, inputs]` and w `[outputs, inputs]` whose products are sums of pairs that cancel each other.

    The same for the same shape. Rounded to bfloat16 an ordinary sum hides most changes of its order; of such a sum
    only rounding errors are left, which no other order repeats.
    """
    generator = seeded(rows * 31 + inputs)
    half, own = -(-inputs // 2), max(1, min(outputs, _MOST // inputs))
    order = torch.randperm(half, generator=generator)
    x = torch.randn(rows, half, generator=generator)
    w = torch.randn(own, half, generator=generator)
    x = torch.cat((x, -x[:, order]), 1)[:, :inputs]
    w = torch.cat((w, w[:, order]), 1)[:, :inputs].to(dtype)
    return x.to(dtype).contiguous(), w.repeat(-(-outputs // own), 1)[:outputs].contiguous()


def cancelling_packed(
    shape: tuple[int, int, int], layout: StepLayout, dtype: torch.dtype
) -> tuple[Tensor, PackedMatrix]:
    """x `[rows, inputs]` and a packed weight whose products are such sums: its groups are there twice, and what they
    are multiplied with is once negative. shape: rows, outputs, inputs.
    """
    rows, outputs, inputs = shape
    generator, half = seeded(rows * 31 + inputs), -(-inputs // 2 // layout.span) * layout.span
    own = max(1, min(outputs, _MOST // inputs))

    def twice(one: Tensor, each: int) -> Tensor:
        whole = torch.cat((one, one), 1)[:, : inputs // each]
        return whole.repeat(-(-outputs // own), 1)[:outputs].contiguous()

    def level(each: int) -> Tensor:
        return twice(torch.randint(1, 60, (own, half // each), generator=generator, dtype=torch.int8), each)

    def scale() -> Tensor:
        found = torch.rand(own, half // layout.span, generator=generator) + 0.5
        return twice(found.to(getattr(torch, layout.scale)), layout.span)

    steps = torch.randint(0, 15 if layout.steps in TABLES else 120, (own, half), generator=generator, dtype=torch.uint8)
    x = torch.randn(rows, half, generator=generator)
    matrix = PackedMatrix(
        layout,
        twice(steps.to(torch.int8) if layout.steps == "int8" else steps, 1),
        scale(),
        level(layout.group) if layout.inner else None,
        level(layout.group) if layout.least else None,
        scale() if layout.least == "own" else None,
    )
    return torch.cat((x, -x), 1)[:, :inputs].to(dtype).contiguous(), matrix


def rolled(rows: Tensor, count: int) -> Tensor:
    """The last row, and the first ones behind it."""
    return torch.cat((rows[-1:], rows[: count - 1]))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@contextmanager
def threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
