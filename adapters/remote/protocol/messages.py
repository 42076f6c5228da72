"""What is asked of a shard's daemon and what it answers: JSON in which every field has one type and a bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from attrs import frozen
from msgspec import Meta, Struct

from adapters.models.decoder.dense_config import HEAD_ROWS
from adapters.models.kernels.step import Segment, Step
from adapters.remote.protocol.frames import LARGEST, MOST_ARGUMENTS
from adapters.sequence_layout import ELEMENT_BYTES, RowSpec, TensorSpec

T = TypeVar("T", bound="WireMessage")
MOST_RUNS = 16  # of one question
MOST_WORDS = 4000  # characters of what is said of a failure

Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Big: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST)]
# All that 63 bits hold: seeds take every value of it, times and bytes a part.
Number: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text: TypeAlias = Annotated[str, Meta(max_length=4096)]
Outcome: TypeAlias = Annotated[str, Meta(max_length=1 << 19)]  # of a numerics probe
Element: TypeAlias = Literal["F32", "BF16", "F16", "I64", "I32", "U8", "I8", "F8_E4M3"]
Shape: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=4)]
Bytes: TypeAlias = tuple[Number, Number, Number]  # weights, rows and states, buffers
KeptRows: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=4096)]  # of one segment, where they are a tree's
Layers: TypeAlias = tuple[Count, Count]
FailureKind: TypeAlias = Literal["refused", "out_of_memory", "failed"]


class Op(IntEnum):
    HELLO = 1
    PROOF = 2
    PROVE = 3
    LOAD = 4
    FORWARD = 16
    LOGITS = 17
    COMMIT = 18
    SETTLE = 19
    SETTLED = 20
    COPY_ROWS = 32
    COPY_STATE = 33
    EXPORT_ROWS = 34
    IMPORT_ROWS = 35
    EXPORT_STATE = 36
    IMPORT_STATE = 37
    KEEP_STATE = 38
    LOAD_STATE = 39
    IMPORT_RUNS = 40
    LOAD_DRAFT = 64
    DRAFT_ROUND = 65
    COPY_CONTEXT = 66
    FETCH_DRAFT = 67
    SEND_DRAFT_AWAY = 68
    LOAD_DRAFTER = 80
    SCORE = 81
    DROP_SCORING = 82


class WireMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """JSON's own types only, no field that is not ours."""


class Described(WireMessage, frozen=True, array_like=True):
    """A tensor of the payload."""

    name: Annotated[str, Meta(max_length=200)]
    dtype: Element
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


Tensors: TypeAlias = Annotated[tuple[Described, ...], Meta(max_length=8192)]  # keys and values of 4,096 layers


class Lent(WireMessage, frozen=True, array_like=True):
    """Tensors of one form in memory that the server lends. place: of the first one's first byte. apart: elements from
    each to the next. strides: of each, in elements.
    """

    names: Annotated[tuple[Annotated[str, Meta(max_length=200)], ...], Meta(min_length=1, max_length=8192)]
    dtype: Element
    shape: Shape
    place: Number
    apart: Number
    strides: Shape

    @property
    def end(self) -> int:
        """Of the last one's last byte, and one more."""
        sizes = (len(self.names), *self.shape)
        steps = (self.apart, *self.strides)
        last = sum(max(size - 1, 0) * step for size, step in zip(sizes, steps, strict=True))
        return self.place + (last + 1) * ELEMENT_BYTES[self.dtype]


class LentRun(WireMessage, frozen=True, array_like=True):
    """Rows of all layers that there are, lent as they lie in a kept run: `[names, heads, room, width]` of the form that
    rows have there, end to end, of which these are `count`. start: of the first one in its slot. place: of its first
    byte.
    """

    start: Count
    count: Count
    place: Number
    room: Count


Lents: TypeAlias = Annotated[tuple[Lent, ...], Meta(max_length=8192)]


class Facts(WireMessage, frozen=True):
    """Who a daemon is. weights, config: of its model. boot: of the machine's start. free: bytes of memory."""

    weights: Text
    config: Text
    layers: Count
    device: Text
    boot: Text
    pid: Number
    free: Number


class Offer(WireMessage, frozen=True, array_like=True):
    """What a probe found, and under which key it may be believed."""

    key: Text
    outcome: Outcome


class Prove(WireMessage, frozen=True):
    """rows: what keys and values are kept in. bits: that matrices are rounded to as they are read; 0: they are not.
    offers: what the server found itself, on a machine that was started as `boot`.
    """

    dtype: Element
    rows: Element
    chunk: Count
    capacity: Count
    boot: Text
    bits: Literal[0, 4, 8] = 0
    offers: Annotated[tuple[Offer, ...], Meta(max_length=16)] = ()


class LoadLayers(WireMessage, frozen=True):
    """limit: bytes of a payload from now on. shared: of memory that both have, to the daemon and from it; 0: none."""

    layers: Layers
    slots: Annotated[int, Meta(ge=1, le=4096)]
    capacity: Count
    buckets: Annotated[tuple[Count, ...], Meta(max_length=256)]
    aux_layers: Annotated[tuple[Count, ...], Meta(max_length=4096)]
    state_places: Annotated[int, Meta(ge=0, le=4096)]
    fast: bool
    limit: Big
    shared: tuple[Big, Big] = (0, 0)


class HeldRows(WireMessage, frozen=True):
    names: Annotated[tuple[Text, ...], Meta(max_length=8192)]
    heads: Count
    width: Count
    dtype: Element


class Loaded(WireMessage, frozen=True):
    capacity: Count
    vocab: Count
    dtype: Element
    rows: HeldRows
    states: Tensors
    state_block: Count
    state_places: Count
    memory: Bytes
    shared: bool

    @property
    def shape(self) -> tuple[object, ...]:
        """What the next one has to have, too."""
        return self.capacity, self.vocab, self.dtype, self.rows, self.states, self.state_block


class Stepped(WireMessage, frozen=True):
    """`Step`, with the segments as triples."""

    segments: Annotated[tuple[tuple[Count, Count, Count], ...], Meta(min_length=1, max_length=4096)]
    bucket: Annotated[int, Meta(ge=1, le=1 << 20)]
    rows_only: bool


class RunStep(WireMessage, frozen=True):
    step: Stepped
    tensors: Tensors


class Forwarded(WireMessage, frozen=True):
    """ns: that it took there. memory: where it has changed."""

    ns: Number
    tensors: Tensors = ()
    memory: Bytes | None = None


class Settle(WireMessage, frozen=True):
    step: Stepped


class Commit(Settle, frozen=True):
    kept: Annotated[tuple[Count | KeptRows, ...], Meta(max_length=4096)]


class StepSettled(WireMessage, frozen=True):
    raised: bool


class CopyState(WireMessage, frozen=True):
    source: Count
    target: Count


class CopyRows(CopyState, frozen=True):
    count: Count


class OneSlot(WireMessage, frozen=True):
    slot: Count


class RowSpan(OneSlot, frozen=True):
    start: Count
    stop: Count


class ImportRows(OneSlot, frozen=True):
    """The tensors are in the payload, or lent."""

    start: Count
    tensors: Tensors = ()
    lent: Lents = ()


class ImportRuns(OneSlot, frozen=True):
    lent: Annotated[tuple[LentRun, ...], Meta(max_length=MOST_RUNS)]


class ImportState(OneSlot, frozen=True):
    """As `ImportRows`."""

    tensors: Tensors = ()
    lent: Lents = ()


class SlotPlace(OneSlot, frozen=True):
    place: Count


class Exported(WireMessage, frozen=True):
    tensors: Tensors


class Nothing(WireMessage, frozen=True):
    pass


class Failure(WireMessage, frozen=True):
    """refused: what was asked for cannot be, and nothing has changed. failed: an exception."""

    kind: FailureKind
    why: Text

    @classmethod
    def of(cls, kind: FailureKind, error: object) -> Failure:
        """What is said of an error: short enough, and text that can be encoded, whatever a file's name has in it."""
        words = str(error) or type(error).__name__
        return cls(kind, words[:MOST_WORDS].encode("utf-8", "replace").decode())


class Unacceptable(ValueError):
    """Arguments that are not what the op has, or tensors that the payload does not hold."""


def encode_message(message: WireMessage) -> bytes:
    """Raises Unacceptable for what no frame holds: the other end would call it malformed, and end the connection."""
    found = msgspec.json.encode(message)
    if len(found) > MOST_ARGUMENTS:
        raise Unacceptable(f"{len(found)} bytes of {type(message).__name__}; accepted: at most {MOST_ARGUMENTS}")
    return found


def decode_message(data: bytes, kind: type[T]) -> T:
    """Raises Refused."""
    try:
        return _decoder(kind)(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unacceptable(f"arguments that are no {kind.__name__}: {str(error)[:200]}") from None


_decoders: dict[type[Any], Callable[[bytes], Any]] = {}


def _decoder(kind: type[T]) -> Callable[[bytes], T]:
    if kind not in _decoders:
        _decoders[kind] = msgspec.json.Decoder(kind).decode
    return _decoders[kind]


def with_logits(step: Step) -> bool:
    """Do the last layers answer a step with its logits, too? Of more rows nobody asks for them at once."""
    return not step.rows_only and step.bucket <= HEAD_ROWS


def encode_step(step: Step) -> Stepped:
    return Stepped(tuple((one.slot, one.start, one.count) for one in step.segments), step.bucket, step.rows_only)


def step_of(told: Stepped) -> Step:
    return Step(tuple(Segment(*one) for one in told.segments), told.bucket, told.rows_only)


@frozen
class Having:
    """What a loaded shard says of itself, in our own words."""

    rows: RowSpec
    states: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, loaded: Loaded) -> Having:
        rows = loaded.rows
        states = tuple(TensorSpec(one.name, one.dtype, one.shape) for one in loaded.states)
        return cls(RowSpec(rows.names, rows.heads, rows.width, rows.dtype), states)
