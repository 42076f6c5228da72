"""The closed list: every matrix product that serving a model can ask for, and in which shapes it was proven.

`Products` says what there is to multiply: it follows from the model's configuration, the row counts of its steps, how
many rows a slot holds, and the threads. `ProductPlan` says what serves: for every weight and every kind of attention
the row counts that gave each row the same bits. A step of another number of rows is multiplied in pieces, or padded.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen

from adapters.checkpoint.packed_matrix import StepLayout
from adapters.models.kernels.delta_interface import BLOCK, CHUNK, DeltaShape

TILE = 256  # keys are read in whole tiles
NARROW = 16  # rows of a step that mostly decodes
# A narrow step over this many bytes of weights may be over before others' threads have left the cores to it: it runs on
# one thread or on all, whichever was quicker lately (`pace.py`).
SMALL = 96 << 20
BATCHED = (4, 8, 16, 32, 64, 128)  # rows of the batched products of recurrent layers
SCORES = 1 << 21  # attention scores at a time, float32, so that they stay in the processor's caches
COUNTS = (4, 8, 16, 32, 64, 128, 256, 512)  # query rows that attend together
QUERIES = 256  # query rows that attend at a time
NATIVE = "native"  # our own in C, a way to multiply with a weight or to attend; any other is a dtype of oneDNN's
PACKED = "packed"  # our own, with weights as they are packed
_EXACT_TILES = 8


class Unproven(RuntimeError):
    """A product was asked for that is not on the list: a bug, since the list is meant to hold all there can be."""


@frozen(order=True)
class Weight:
    """A weight matrix `[outputs, inputs]`; gated: two of them, silu(x @ gate) * (x @ up), in one operation.

    layout: as it is packed. part_of: outputs of the weight that it is a part of, if other parts are packed otherwise.
    most: rows that it is ever multiplied with at once; a head sees the rows whose logits are asked for, no chunks.
    """

    outputs: int
    inputs: int
    gated: bool = False
    layout: StepLayout | None = field(default=None, order=False)
    part_of: int = field(default=0, eq=False, order=False)
    most: int = field(default=1 << 20, eq=False, order=False)


@frozen(order=True)
class Heads:
    """Attention where `group` query heads of `size` share a key/value head, over slots of `keys` rows at most."""

    group: int
    size: int
    keys: int = field(eq=False, order=False)


@frozen
class Products:
    """Everything that may be multiplied. rows: of the steps, ascending, the last is a prefill's chunk. deltas: of
    recurrent layers, whose heads are multiplied in batches.

    threads: of narrow steps to begin with, and of wide ones; narrow ones may run on either number. wider: 16-bit
    weights may be kept in float32, if that is faster. packed: weights as they are packed, with all parts of such as are
    packed in several ways. unpacked: they may be kept as what they stand for, if that is faster.
    """

    weights: tuple[Weight, ...]
    heads: tuple[Heads, ...]
    rows: tuple[int, ...]
    threads: tuple[int, int]
    wider: bool = True
    deltas: tuple[DeltaShape, ...] = ()
    packed: tuple[Weight, ...] = ()
    unpacked: bool = True


@frozen
class Served:
    """How products with one weight are computed.

    way: a dtype of oneDNN's products, or our own; the result is rounded to the model's dtype. rows: the counts that
    agree bit for bit, ascending. wide: the one among them in which more rows are multiplied piece by piece.
    """

    weight: Weight
    way: str
    rows: tuple[int, ...]
    wide: int

    def piece(self, rows: int) -> int:
        """What a step of so many rows is cut into, or padded up to."""
        fitting = [count for count in self.rows if count <= min(rows, self.wide)]
        return fitting[-1] if fitting else self.rows[0]


@frozen
class ServedHeads:
    """How one kind of attention is computed.

    dtype: of the product of weights and values. terms: keys of one such product; the results are added up in float32.
    rows: counts of query rows that agree, ascending. Where attention is our own, dtype says so, rows are those of
    steps, and terms mean nothing.
    """

    heads: Heads
    dtype: str
    rows: tuple[int, ...]
    terms: int


@frozen
class ServedDelta:
    """How one kind of recurrent layer is computed, in float32. rows: the counts at which all its products agree.

    Where the rule is our own, way says so, and rows are those of steps.
    """

    delta: DeltaShape
    rows: tuple[int, ...]
    way: str = "float32"


@frozen
class ProductPlan:
    """What serves: the proven part of the list. steps: the row counts of steps; none: any, and nothing is promised."""

    steps: tuple[int, ...]
    threads: tuple[int, int]
    weights: tuple[Served, ...]
    heads: tuple[ServedHeads, ...]
    deltas: tuple[ServedDelta, ...] = ()
    packed: tuple[Served, ...] = ()

    def numbers(self) -> tuple[object, ...]:
        """All of it that bits depend on."""
        weights = ((one.weight.outputs, one.weight.inputs, one.weight.gated, one.way, one.rows) for one in self.weights)
        heads = ((one.heads.group, one.heads.size, one.dtype, one.rows, one.terms) for one in self.heads)
        deltas = ((repr(one.delta), one.way, one.rows) for one in self.deltas)
        packed = ((str(one.weight.layout), one.weight.outputs, one.weight.inputs, one.way) for one in self.packed)
        return (self.steps, *sorted(weights), *sorted(heads), *sorted(deltas), *sorted(packed))

    def shown(self) -> list[str]:
        """A line for each product."""
        weights = (
            f"{one.weight.inputs} to {one.weight.outputs}{', gated' if one.weight.gated else ''}: "
            f"{one.way if one.weight.layout is None else f'{one.way} {one.weight.layout}'}, "
            f"rows {', '.join(map(str, one.rows))}, wide steps by {one.wide}"
            for one in (*self.weights, *self.packed)
        )
        heads = (
            f"attention, {one.heads.group} query heads of {one.heads.size} a key head: {one.dtype}, "
            f"rows {', '.join(map(str, one.rows))}{'' if one.dtype == NATIVE else f', values by {one.terms}'}"
            for one in self.heads
        )
        deltas = (
            f"delta rule, {one.delta.value_heads} heads of {one.delta.key_size} x {one.delta.value_size}: {one.way}, "
            f"rows {', '.join(map(str, one.rows))}"
            for one in self.deltas
        )
        return [*weights, *heads, *deltas]

    def weight(self, outputs: int, inputs: int, *, gated: bool = False) -> Served:
        """Raises Unproven."""
        for served in self.weights:
            if served.weight == Weight(outputs, inputs, gated):
                return served
        raise Unproven(f"products with a {'gated ' if gated else ''}weight of {outputs} x {inputs} were never proven")

    def as_packed(self, outputs: int, inputs: int, layout: StepLayout, *, gated: bool = False) -> bool:
        """Whether such a weight is multiplied as it is packed."""
        wanted = Weight(outputs, inputs, gated, layout)
        return any(served.weight == wanted for served in self.packed)

    def attention(self, group: int, size: int) -> ServedHeads:
        """Raises Unproven."""
        for served in self.heads:
            if (served.heads.group, served.heads.size) == (group, size):
                return served
        raise Unproven(f"attention of {group} query heads of {size} to a key head was never proven")

    def delta(self, shape: DeltaShape) -> ServedDelta:
        """Raises Unproven."""
        for served in self.deltas:
            if served.delta == shape:
                return served
        raise Unproven(f"products of {shape} were never proven")


def batched(delta: DeltaShape) -> tuple[tuple[int, int, int], ...]:
    """The products of a recurrent layer: heads, terms of a sum, outputs."""
    heads, size = delta.value_heads, delta.value_size
    return (
        (delta.key_heads, delta.key_size, CHUNK),  # keys and queries with the chunk's keys
        (heads, delta.key_size, size),  # the same with the state
        (heads, CHUNK, size),  # with the chunk's corrections, and of keys with them
        (heads, BLOCK, size),  # the inverse of a block
    )


def spans(capacity: int) -> tuple[int, ...]:
    """How many keys a row may attend over, for rows up to `capacity`: whole tiles, in steps of an eighth at most.

    So that the list stays short however long the context is: what is read beyond a row's own keys weighs exactly zero.
    """
    found, keys, step = list[int](), TILE, TILE
    while keys < capacity:
        found.append(keys)
        if keys >= step * 2 * _EXACT_TILES:
            step *= 2
        keys += step
    return (*found, capacity)


def span_of(keys: int, capacity: int) -> int:
    """The shortest span that holds so many keys."""
    step = TILE
    while keys > step * 2 * _EXACT_TILES:
        step *= 2
    return min(-(-keys // step) * step, capacity)


def queries(group: int, keys: int, rows: Sequence[int]) -> int:
    """How many rows of a sequence, each of `group` queries, attend together over so many keys."""
    most = min(QUERIES, SCORES // keys)
    fitting = [count for count in rows if count <= most] or rows[:1]
    return max(1, fitting[-1] // group)


def checked(plan: ProductPlan) -> ProductPlan:
    """Raises ValueError for a plan, read from somewhere, that no proof can have made."""
    groups = (
        [one.rows for one in (*plan.weights, *plan.packed)]
        + [one.rows for one in plan.heads]
        + [one.rows for one in plan.deltas]
    )
    if any(not rows or rows[0] < 1 or rows != tuple(sorted(set(rows))) for rows in groups):
        raise ValueError("a plan of products with impossible row counts")
    if any(one.wide not in one.rows for one in plan.weights) or any(one.terms < TILE for one in plan.heads):
        raise ValueError("a plan of products with impossible pieces")
    ways = {one.way for one in plan.weights} | {one.dtype for one in plan.heads} | {one.way for one in plan.deltas}
    ways |= {one.way for one in plan.packed}
    if not ways <= {NATIVE, PACKED, "float32", "bfloat16", "float16"}:
        raise ValueError("a plan of products in an unknown way")
    if min(plan.threads) < 1:
        raise ValueError("a plan of products for no thread")
    return plan


@frozen
class Proof:
    """plan: what serves; None for kernels that need none, or if some product agrees with itself at no row count.

    holds: any row count of a step may serve. shapes: how many products were proven. checks: how many comparisons that
    took. single: one thread gives the same bits, so the thread count is no part of the numerics class. digest: of the
    bits that came out.
    """

    plan: ProductPlan | None
    holds: bool = True
    shapes: int = 0
    checks: int = 0
    failures: tuple[str, ...] = ()
    single: bool = True
    digest: str = ""
