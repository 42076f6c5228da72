"""Trials of one product: which row counts give each row the same bits.

The numbers are made so that each sum cancels. Only rounding errors are left, and any other order of adding shows in
nearly every element.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from attrs import define, field
from torch import Tensor

from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.multiplier import ExactAttention, Multiplier, dtype_name
from adapters.models.kernels.interfaces.product_list import NATIVE, PACKED, SCORES, TILE, Heads, Weight
from adapters.models.kernels.proof.cancelling import make_cancelling, make_cancelling_packed

_RUNS = 4
_WHOLE = {2: torch.int16, 4: torch.int32}
# Row counts that are no bucket. Fused layers skip padded rows, so their products have such counts.
BETWEEN = (1, 2, 3, 5, 7, 11, 13)


@define(eq=False)
class Group:
    """Row counts that agree. reference: the result for every row of the trial's x, as all of them compute it."""

    rows: list[int]
    reference: Tensor


@define(eq=False)
class Trial:
    """A product that is tried with rows of x `[C, K]`. way: how it is computed. thread_counts: under which it may be
    asked for.
    """

    name: str
    way: str
    x: Tensor
    thread_counts: tuple[int, ...]
    multiply: Callable[[Tensor], Tensor]
    checks: int = 0
    failures: list[str] = field(factory=list)

    def compute_all(self, count: int, threads: int) -> Tensor:
        torch.set_num_threads(threads)
        return torch.cat([self.multiply(part) for part in torch.split(self.x, count)])

    def has_same_bits(self, found: Tensor, expected: Tensor) -> bool:
        self.checks += 1
        whole = _WHOLE[
            found.itemsize
        ]  # whole elements are compared, because comparing bytes took most of a proof's time
        return torch.equal(found.view(whole), expected.view(whole))

    def find_difference(self, count: int, reference: Tensor, threads: int) -> str | None:
        """Return how a row of a product with this many rows differs from its reference, or None.

        Braces in the text stand for the rows that the reference was computed with. The caller fills them in.
        """
        torch.set_num_threads(threads)
        x = self.x
        last = len(self.x) - count
        for at in sorted({0, last}):
            if not self.has_same_bits(self.multiply(x[at : at + count]), reference[at : at + count]):
                return f"{count} rows differ from {{}} ({threads} threads)"
        moved = roll_rows(x, count)
        expected = roll_rows(reference, count)
        if not self.has_same_bits(self.multiply(moved), expected):
            return f"{count} rows: where a row stands changes it ({threads} threads)"
        for others, said in ((0.0, "its neighbours"), (float("nan"), "a neighbour that is not a number")):
            for at, row in ((0, len(x) - 1), (count - 1, 0)):
                neighbours = torch.full_like(x[:count], others)
                neighbours[at] = x[row]
                if not self.has_same_bits(self.multiply(neighbours)[at], reference[row]):
                    return f"{count} rows: {said} change a row ({threads} threads)"
        return None

    def find_groups(self, counts: Sequence[int]) -> list[Group]:
        """Put each count into the first group that it agrees with. A count that does not agree with itself is in no
        group.
        """
        found: list[Group] = []
        for count in counts:
            home = next(
                (group for group in found if self.find_difference_on_threads(count, group.reference) is None), None
            )
            if home is not None:
                home.rows.append(count)
                continue
            own = self.compute_all(count, self.thread_counts[0])
            why = self.find_difference_on_threads(count, own)
            if why is None:
                found.append(Group([count], own))
            else:
                self.failures.append(f"{self.name}: {why.format('themselves')}")
        return found if self.way not in {NATIVE, PACKED} or self.check_other_counts(found, counts) else []

    def check_other_counts(self, found: Sequence[Group], counts: Sequence[int]) -> bool:
        """Return whether all counts agree, and counts that are no bucket agree with them."""
        if [one.rows for one in found] != [[*counts]]:
            self.failures += [f"{self.name}: {one.rows} rows differ from {found[0].rows}" for one in found[1:]]
            return False
        between = (count for count in BETWEEN if count < max(counts))
        whys = [
            why for count in between if (why := self.find_difference_on_threads(count, found[0].reference)) is not None
        ]
        self.failures += [f"{self.name}: {why.format(found[0].rows[0])}" for why in whys]
        return not whys

    def find_difference_on_threads(self, count: int, reference: Tensor) -> str | None:
        return next(
            (why for one in self.thread_counts if (why := self.find_difference(count, reference, one)) is not None),
            None,
        )

    def measure(self, count: int, threads: int) -> float:
        torch.set_num_threads(threads)
        part = self.x[:count]
        best = float("inf")
        for _ in range(_RUNS):
            start = time.perf_counter()
            self.multiply(part)
            best = min(best, time.perf_counter() - start)
        return best


@define(eq=False)
class ScoresTrial(Trial):
    """Queries times keys: besides the row count, the number of keys changes from step to step.

    keys: `[n, hd]`. spans: numbers of first keys that are tried. product: multiplies query rows with keys. least: the
    smallest count of query rows with room for one position. It is used however many keys there are.
    """

    keys: Tensor = field(kw_only=True)
    spans: tuple[int, ...] = field(kw_only=True)
    product: Callable[[Tensor, Tensor], Tensor] = field(kw_only=True)
    least: int = field(kw_only=True)

    def find_difference(self, count: int, reference: Tensor, threads: int) -> str | None:
        why = super().find_difference(count, reference, threads)
        if why is not None:
            return why
        moved = roll_rows(self.x, count)
        expected = roll_rows(reference, count)
        for span in self.spans:
            # At most SCORES scores are computed together, and each query row has `span` of them. Larger counts are
            # never used over so many keys (`count_query_rows`).
            if count <= max(self.least, SCORES // span):
                found = self.product(moved, self.keys[:span])
                if not self.has_same_bits(found, expected[:, :span]):
                    # The caller fills the braces with the rows that the reference was computed with.
                    return f"{count} rows over {span} keys differ from {{}} over {len(self.keys)} ({threads} threads)"
        return None


@define(eq=False)
class ValuesTrial(Trial):
    """Weights times values: fewer keys than `terms` must give what missing keys with weight zero give."""

    values: Tensor = field(kw_only=True)  # [K, hd]
    product: Callable[[Tensor, Tensor], Tensor] = field(kw_only=True)

    def find_difference(self, count: int, reference: Tensor, threads: int) -> str | None:
        why = super().find_difference(count, reference, threads)
        if why is not None:
            return why
        for terms in range(TILE, len(self.values), TILE):
            short = self.x[:count, :terms].contiguous()
            padded = torch.zeros_like(self.x[:count])
            padded[:, :terms] = short
            if not self.has_same_bits(self.product(short, self.values[:terms]), self.multiply(padded)):
                return f"{count} rows: {terms} values and {len(self.values)} differ ({threads} threads)"
        return None


def make_weight_trial(kernels: Multiplier, weight: Weight, rows: int, way: str, threads: tuple[int, ...]) -> Trial:
    """Make the trial of a weight. rows: the most that are multiplied together."""
    name = f"{weight.inputs} to {weight.outputs} in {way}"
    x, w = make_cancelling(rows, weight.outputs, weight.inputs, kernels.operand_dtype(way))
    packed = kernels.reorder(w, way)
    if not weight.gated:
        return Trial(name, way, x, threads, lambda some: kernels.multiply(some, packed))
    up = kernels.reorder(w.roll(1, 0), way)
    return Trial(f"gated {name}", way, x, threads, lambda some: kernels.multiply_gated(some, packed, up))


def make_packed_trial(kernels: Multiplier, weight: Weight, rows: int, threads: tuple[int, ...]) -> Trial | None:
    """Make the trial of a weight that has a layout; None where nothing multiplies it in its packed form."""
    layout = weight.layout
    name = f"{weight.inputs} to {weight.outputs} in {weight.layout}"
    assert layout is not None
    x, matrix = make_cancelling_packed((rows, weight.outputs, weight.inputs), layout, kernels.operand_dtype(NATIVE))
    packed = kernels.pack_steps(matrix)
    if packed is None:
        return None
    if not weight.gated:
        return Trial(name, PACKED, x, threads, lambda some: kernels.multiply(some, packed))
    up = kernels.pack_steps(matrix.map_tensors(lambda one: one.roll(1, 0)))
    return Trial(f"gated {name}", PACKED, x, threads, lambda some: kernels.multiply_gated(some, packed, up))


def make_scores_trial(
    multiply: Callable[[Tensor, Tensor], Tensor],
    heads: Heads,
    rows: tuple[int, int],
    spans: tuple[int, ...],
    threads: tuple[int, ...],
) -> ScoresTrial:
    """Make the trial of attention scores. rows: the most query rows, and `least` of the trial. spans: as in it."""
    x, keys = make_cancelling(rows[0], heads.keys, heads.size, torch.float32)
    return ScoresTrial(
        f"scores of heads of {heads.size}",
        dtype_name(x.dtype),
        x,
        threads,
        lambda some: multiply(some, keys),
        keys=keys,
        spans=spans,
        product=multiply,
        least=rows[1],
    )


def make_values_trial(
    multiply: Callable[[Tensor, Tensor], Tensor],
    heads: Heads,
    rows: int,
    terms: int,
    dtype: torch.dtype,
    threads: tuple[int, ...],
) -> ValuesTrial:
    x, w = make_cancelling(rows, heads.size, terms, dtype)
    values = w.t().contiguous()
    name = f"{terms} values of heads of {heads.size} in {dtype_name(dtype)}"

    def product(some: Tensor, those: Tensor) -> Tensor:
        return multiply(some, those.t())

    return ValuesTrial(
        name, dtype_name(dtype), x, threads, lambda some: product(some, values), values=values, product=product
    )


def make_batched_trial(rows: int, shape: tuple[int, int, int], threads: tuple[int, ...]) -> Trial:
    """Make a trial in which all heads multiply the same rows, each with its own weight. shape: heads, terms of a sum,
    outputs.
    """
    heads, terms, outputs = shape
    x, w = make_cancelling(rows, heads * outputs, terms, torch.float32)
    weights = w.view(heads, outputs, terms).transpose(1, 2).contiguous()

    def multiply(some: Tensor) -> Tensor:
        return torch.bmm(some.expand(heads, -1, -1).contiguous(), weights).transpose(0, 1).flatten(1)

    return Trial(f"{heads} times {terms} to {outputs}", dtype_name(x.dtype), x, threads, multiply)


def make_attention_trial(
    attention: ExactAttention, dtype: torch.dtype, shape: tuple[int, int], rows: int, threads: tuple[int, ...]
) -> Trial:
    """Make the trial of the library's attention with `rows` rows that all see the same keys.

    The keys include parts of the first and of the last tile and all tiles between. What else rows may see is tried
    layer by layer (`probe.py`). shape: queries for each key head, and their size. dtype: of keys and values; the
    compared results are never rounded to it.
    """
    group, size = shape
    generator = make_generator(size)
    keys = 2 * TILE
    x = torch.randn(rows, group * size, generator=generator) * size**-0.25
    k, v = (torch.randn(2, 1, 1, keys, size, generator=generator) * size**-0.25).to(dtype)
    slots = torch.zeros(rows, dtype=torch.int64)
    exact = attention.with_output(torch.float32)
    low = slots + 3
    high = slots + keys - 131

    def attend(some: Tensor) -> Tensor:
        seen = low[: len(some)], high[: len(some)]
        return exact.attend(some.view(-1, 1, group, size), slots[: len(some)], seen, k, v)

    return Trial(f"attention of heads of {size}", NATIVE, x, threads, attend)


def find_agreeing_rows(
    heads: Heads, weighed: list[Group], scored: list[Group]
) -> list[tuple[tuple[int, ...], Group, Group]]:
    """Return the row counts at which both products agree, if a position's queries fit into one of them."""
    found = []
    for values in weighed:
        for scores in scored:
            rows = tuple(count for count in values.rows if count in scores.rows)
            if rows and rows[-1] >= heads.group:
                found.append((rows, scores, values))
    return found


def roll_rows(rows: Tensor, count: int) -> Tensor:
    """Return the last row followed by the first ones."""
    return torch.cat((rows[-1:], rows[: count - 1]))


def view_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@contextmanager
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
