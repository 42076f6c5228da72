"""The closed list: every matrix product that serving a model can ask for, and the shapes in which each was proven.

`Products` says what there is to multiply. It follows from the model's configuration, the row counts of its steps, the
rows of a slot and the threads. `ProductPlan` says what serves: for every weight and every kind of attention the row
counts that gave each row the same bits. A step with another number of rows is multiplied in pieces, or padded.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen

from adapters.checkpoint.packed_matrix import TABLES, StepLayout
from adapters.models.kernels.interfaces.delta_interface import BLOCK, CHUNK, DeltaShape

TILE = 256  # keys are read in whole tiles
NARROW = 16  # a step with up to this many rows mostly decodes
# A narrow step over up to this many bytes of weights may end before the threads of other processes have left the cores.
# It runs on one thread or on all, whichever was quicker lately (`cpu/thread_tuning.py`).
SMALL = 96 << 20
BATCHED = (4, 8, 16, 32, 64, 128)  # rows of the batched products of recurrent layers
SCORES = 1 << 21  # attention scores that are computed together in float32, so that they stay in the processor's caches
COUNTS = (4, 8, 16, 32, 64, 128, 256, 512)  # query rows that attend together
QUERIES = 256  # query rows that attend at a time
NATIVE = "native"  # the way of the compiled library; other ways are dtypes of oneDNN's products
PACKED = "packed"  # the way of the compiled library with packed weights
_EXACT_TILES = 8


class UnprovenProductError(RuntimeError):
    """A product was asked for that is not on the list. That is a bug, because the list is meant to hold all there can
    be.
    """


@frozen(order=True)
class Weight:
    """A weight matrix `[outputs, inputs]`. gated: two of them, silu(x @ gate) * (x @ up), in one operation.

    layout: how it is packed. most: rows that it is ever multiplied with together; a head sees only rows whose logits
    are asked for, never whole chunks.
    """

    outputs: int
    inputs: int
    gated: bool = False
    layout: StepLayout | None = field(default=None, order=False)
    most: int = field(default=1 << 20, eq=False, order=False)


@frozen(order=True)
class Heads:
    """Attention in which `group` query heads of `size` share a key head, over slots of at most `keys` rows."""

    group: int
    size: int
    keys: int = field(eq=False, order=False)


@frozen
class Products:
    """Everything that may be multiplied. rows: row counts of steps, ascending; the last one is a prefill chunk.
    deltas: recurrent layers, whose heads are multiplied in batches.

    threads: the number that narrow steps begin with, and the number for wide steps; narrow steps may run on either.
    wider: 16-bit weights may be kept in float32 if that is faster. packed: weights in their packed form, with all
    parts of weights that are packed in several ways. unpacked: there is memory to unpack packed weights. small: all
    weights together take at most SMALL bytes unpacked.
    """

    weights: tuple[Weight, ...]
    heads: tuple[Heads, ...]
    rows: tuple[int, ...]
    threads: tuple[int, int]
    wider: bool = True
    deltas: tuple[DeltaShape, ...] = ()
    packed: tuple[Weight, ...] = ()
    unpacked: bool = True
    small: bool = False


@frozen
class ServedWeight:
    """The way in which products with one weight are computed.

    way: a dtype of oneDNN's products, or the compiled library; the result is rounded to the model's dtype. rows: the
    row counts that agree bit for bit, ascending. wide: the count in which a step with more rows is multiplied piece
    by piece.
    """

    weight: Weight
    way: str
    rows: tuple[int, ...]
    wide: int

    def piece_rows(self, rows: int) -> int:
        """Return the row count that a step of this many rows is cut into, or padded up to."""
        fitting = [count for count in self.rows if count <= min(rows, self.wide)]
        return fitting[-1] if fitting else self.rows[0]


@frozen
class ServedHeads:
    """The way in which one kind of attention is computed.

    dtype: of the product of weights and values. terms: keys of one such product; the results are added up in float32.
    rows: counts of query rows that agree, ascending. For attention of the compiled library dtype is NATIVE, rows are
    row counts of steps, and terms mean nothing.
    """

    heads: Heads
    dtype: str
    rows: tuple[int, ...]
    terms: int


@frozen
class ServedDelta:
    """The way in which one kind of recurrent layer is computed, in float32. rows: the counts at which all its
    products agree.

    For the rule of the compiled library way is NATIVE, and rows are row counts of steps.
    """

    delta: DeltaShape
    rows: tuple[int, ...]
    way: str = "float32"


@frozen
class ProductPlan:
    """The proven part of the list. steps: row counts of steps; an empty tuple allows any count and promises nothing."""

    steps: tuple[int, ...]
    threads: tuple[int, int]
    weights: tuple[ServedWeight, ...]
    heads: tuple[ServedHeads, ...]
    deltas: tuple[ServedDelta, ...] = ()
    packed: tuple[ServedWeight, ...] = ()

    @property
    def is_native(self) -> bool:
        """Return whether the compiled library computes all products with weights. Its bits depend on no threads."""
        return all(one.way == NATIVE for one in self.weights)

    def bit_signature(self) -> tuple[object, ...]:
        """Return all parts of the plan that bits depend on."""
        weights = ((one.weight.outputs, one.weight.inputs, one.weight.gated, one.way, one.rows) for one in self.weights)
        heads = ((one.heads.group, one.heads.size, one.dtype, one.rows, one.terms) for one in self.heads)
        deltas = ((repr(one.delta), one.way, one.rows) for one in self.deltas)
        packed = ((str(one.weight.layout), one.weight.outputs, one.weight.inputs, one.way) for one in self.packed)
        return (self.steps, *sorted(weights), *sorted(heads), *sorted(deltas), *sorted(packed))

    def describe_lines(self) -> list[str]:
        """Return a line of text for each product."""
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

    def find_weight(self, outputs: int, inputs: int, *, gated: bool = False) -> ServedWeight:
        """Return how a weight is multiplied. Raises UnprovenProductError."""
        for served in self.weights:
            if served.weight == Weight(outputs, inputs, gated):
                return served
        raise UnprovenProductError(
            f"products with a {'gated ' if gated else ''}weight of {outputs} x {inputs} were never proven"
        )

    def multiplies_packed(self, outputs: int, inputs: int, layout: StepLayout, *, gated: bool = False) -> bool:
        """Return whether such a weight is multiplied in its packed form."""
        wanted = Weight(outputs, inputs, gated, layout)
        return any(served.weight == wanted for served in self.packed)

    def find_attention(self, group: int, size: int) -> ServedHeads:
        """Return how attention of this kind is computed. Raises UnprovenProductError."""
        for served in self.heads:
            if (served.heads.group, served.heads.size) == (group, size):
                return served
        raise UnprovenProductError(f"attention of {group} query heads of {size} to a key head was never proven")

    def find_delta(self, shape: DeltaShape) -> ServedDelta:
        """Return how a recurrent layer is computed. Raises UnprovenProductError."""
        for served in self.deltas:
            if served.delta == shape:
                return served
        raise UnprovenProductError(f"products of {shape} were never proven")


def is_unpacked(products: Products, layout: StepLayout) -> bool:
    """Return whether a processor with tiles multiplies packed weights of this layout unpacked.

    In large models, tiles make up for the larger weights where steps have four bits: a chunk and 32 decode steps take
    about half of the time. With steps of 8 bits less is gained. In small models decode steps lose as much as prompts
    gain. A measured time may not decide, because both have other bits.
    """
    return products.unpacked and not products.small and layout.steps in TABLES


def list_batched_products(delta: DeltaShape) -> tuple[tuple[int, int, int], ...]:
    """Return the products of a recurrent layer: heads, terms of a sum, outputs."""
    heads = delta.value_heads
    size = delta.value_size
    return (
        (delta.key_heads, delta.key_size, CHUNK),  # keys and queries with the chunk's keys
        (heads, delta.key_size, size),  # the same with the state
        (heads, CHUNK, size),  # with the chunk's corrections, and of keys with them
        (heads, BLOCK, size),  # the inverse of a block
    )


def list_spans(capacity: int) -> tuple[int, ...]:
    """Return how many keys a row may attend over, for rows up to `capacity`: whole tiles, in steps of at most an
    eighth.

    The list stays short however long the context is, because keys beyond a row's own weigh exactly zero.
    """
    found = list[int]()
    keys = TILE
    step = TILE
    while keys < capacity:
        found.append(keys)
        if keys >= step * 2 * _EXACT_TILES:
            step *= 2
        keys += step
    return (*found, capacity)


def span_of(keys: int, capacity: int) -> int:
    """Return the shortest span that holds this many keys."""
    step = TILE
    while keys > step * 2 * _EXACT_TILES:
        step *= 2
    return min(-(-keys // step) * step, capacity)


def count_query_rows(group: int, keys: int, rows: Sequence[int]) -> int:
    """Return how many rows of a sequence, each with `group` queries, attend together over this many keys."""
    most = min(QUERIES, SCORES // keys)
    fitting = [count for count in rows if count <= most] or rows[:1]
    return max(1, fitting[-1] // group)


def check_plan(plan: ProductPlan) -> ProductPlan:
    """Return the plan. Raises ValueError for one, read from a file or a message, that no proof can have made."""
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
    """The result of a proof. plan: what serves; None for kernels that need none, or if some product agrees with
    itself at no row count.

    holds: any row count of a step may serve. shapes: how many products were proven. checks: how many comparisons that
    took. single: one thread gives the same bits, so the thread count is no part of the numerics class. digest: a
    digest of the resulting bits.
    """

    plan: ProductPlan | None
    holds: bool = True
    shapes: int = 0
    checks: int = 0
    failures: tuple[str, ...] = ()
    single: bool = True
    digest: str = ""
