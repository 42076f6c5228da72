"""The messages between a server and a shard's daemon: JSON in which every field has one type and a bound.

The name of a field is part of the protocol. The name of a class is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from attrs import frozen
from msgspec import Meta, Struct

from adapters.models.decoder.config.dense_config import HEAD_ROWS
from adapters.models.kernels.step import Segment, Step
from adapters.remote.protocol.frames import LARGEST, MOST_ARGUMENTS
from adapters.sequence_layout import ELEMENT_BYTES, RowSpec, TensorSpec

T = TypeVar("T", bound="WireMessage")
MOST_RUNS = 16  # runs of rows in one request
MOST_WORDS = 4000  # characters of the text of a failure

Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Big: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST)]
# Any integer of 63 bits. Seeds use the whole range; times and sizes use a part of it.
Number: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text: TypeAlias = Annotated[str, Meta(max_length=4096)]
Outcome: TypeAlias = Annotated[str, Meta(max_length=1 << 19)]  # the JSON of a numerics probe's outcome
Element: TypeAlias = Literal["F32", "BF16", "F16", "I64", "I32", "U8", "I8", "F8_E4M3"]
Shape: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=4)]
Bytes: TypeAlias = tuple[Number, Number, Number]  # weights, rows and states, buffers
KeptRows: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=4096)]  # the kept path of one tree
Layers: TypeAlias = tuple[Count, Count]
FailureKind: TypeAlias = Literal["refused", "out_of_memory", "failed"]


class Op(IntEnum):
    """The requests of a server. Their numbers cross, and their names do not."""

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
    DRAFT_STEP = 65
    COPY_CONTEXT = 66
    FETCH_DRAFT = 67
    SEND_DRAFT_AWAY = 68
    LOAD_SCORER = 80
    SCORE = 81
    DROP_SCORING = 82


class WireMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all messages. Unknown fields are refused."""


class Described(WireMessage, frozen=True, array_like=True):
    """The name, element type and shape of a tensor in the payload."""

    name: Annotated[str, Meta(max_length=200)]
    dtype: Element
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


Tensors: TypeAlias = Annotated[tuple[Described, ...], Meta(max_length=8192)]  # keys and values of 4,096 layers


class Lent(WireMessage, frozen=True, array_like=True):
    """Tensors of one shape in memory that the server lends, at equal distances.

    offset: of the first byte of the first tensor. apart: elements from each tensor to the next. strides: of each
    tensor, in elements.
    """

    names: Annotated[tuple[Annotated[str, Meta(max_length=200)], ...], Meta(min_length=1, max_length=8192)]
    dtype: Element
    shape: Shape
    offset: Number
    apart: Number
    strides: Shape

    @property
    def end(self) -> int:
        """The offset after the last byte of the last tensor."""
        sizes = (len(self.names), *self.shape)
        steps = (self.apart, *self.strides)
        last = sum(max(size - 1, 0) * step for size, step in zip(sizes, steps, strict=True))
        return self.offset + (last + 1) * ELEMENT_BYTES[self.dtype]


class LentRun(WireMessage, frozen=True, array_like=True):
    """`count` rows of all layers, lent as they lie in a run of the store: `[names, heads, room, width]`, contiguous.

    start: the position of the first row in its slot. offset: of the first byte. room: rows that the run has memory for.
    """

    start: Count
    count: Count
    offset: Number
    room: Count


Lents: TypeAlias = Annotated[tuple[Lent, ...], Meta(max_length=8192)]


class Facts(WireMessage, frozen=True):
    """The description of itself that a daemon gives in its `Welcome`.

    weights, config: digests of its model. layers: of the whole model. boot: identifies the machine and its last start.
    free: bytes of its device that are free now.
    """

    weights: Text
    config: Text
    layers: Count
    device: Text
    boot: Text
    pid: Number
    free: Number


class Offer(WireMessage, frozen=True, array_like=True):
    """The outcome of a numerics probe, and the key of everything that it depends on."""

    key: Text
    outcome: Outcome


class Prove(WireMessage, frozen=True):
    """The request to prove the numerics of the daemon's device.

    rows: the formats of kept keys and values, named as in `--kv-dtype`; auto: `dtype`. bits: that matrices are
    quantised to when they are read; 0: they are not. offers: outcomes of the server. The daemon uses one instead of a
    probe if the key and `boot` are its own.
    """

    dtype: Element
    rows: Text
    chunk: Count
    capacity: Count
    boot: Text
    bits: Literal[0, 4, 8] = 0
    offers: Annotated[tuple[Offer, ...], Meta(max_length=16)] = ()


class LoadLayers(WireMessage, frozen=True):
    """The request to load layers.

    limit: the largest payload from now on, in bytes. shared: bytes of shared memory to the daemon and from it; 0: none.
    """

    layers: Layers
    slots: Annotated[int, Meta(ge=1, le=4096)]
    capacity: Count
    buckets: Annotated[tuple[Count, ...], Meta(max_length=256)]
    aux_layers: Annotated[tuple[Count, ...], Meta(max_length=4096)]
    state_checkpoints: Annotated[int, Meta(ge=0, le=4096)]
    fast: bool
    limit: Big
    shared: tuple[Big, Big] = (0, 0)


class HeldRows(WireMessage, frozen=True):
    """The layout of the rows of a slot, as in `RowSpec`."""

    names: Annotated[tuple[Text, ...], Meta(max_length=8192)]
    heads: Count
    width: Count
    dtype: Element


class Loaded(WireMessage, frozen=True):
    """Loaded layers. shared: shared memory is in use."""

    capacity: Count
    vocab: Count
    dtype: Element
    rows: HeldRows
    states: Tensors
    state_block: Count
    state_checkpoints: Count
    memory: Bytes
    shared: bool

    @property
    def shape(self) -> tuple[object, ...]:
        """The facts that must be the same after the process was started again."""
        return self.capacity, self.vocab, self.dtype, self.rows, self.states, self.state_block


class Stepped(WireMessage, frozen=True):
    """A `Step`, with its segments as triples."""

    segments: Annotated[tuple[tuple[Count, Count, Count], ...], Meta(min_length=1, max_length=4096)]
    bucket: Annotated[int, Meta(ge=1, le=1 << 20)]
    rows_only: bool


class RunStep(WireMessage, frozen=True):
    """The request to run a step. tensors: tokens for the first layers of a model, otherwise hidden states."""

    step: Stepped
    tensors: Tensors


class Forwarded(WireMessage, frozen=True):
    """The result of a step. ns: time that the daemon spent. memory: given if it has changed."""

    ns: Number
    tensors: Tensors = ()
    memory: Bytes | None = None


class Settle(WireMessage, frozen=True):
    """The announcement of a step that settles positional state, so that a failure of a later shard can undo it."""

    step: Stepped


class Commit(Settle, frozen=True):
    """The request to keep rows of a step. kept: for each slot a number of rows, or the path of a tree."""

    kept: Annotated[tuple[Count | KeptRows, ...], Meta(max_length=4096)]


class StepSettled(WireMessage, frozen=True):
    """The end of a step that was announced by `Settle`. raised: it failed, so its state is restored."""

    raised: bool


class Exported(WireMessage, frozen=True):
    tensors: Tensors


class Nothing(WireMessage, frozen=True):
    pass


class Failure(WireMessage, frozen=True):
    """A failed request. refused: by a ValueError, mostly of arguments, which are checked before anything changes.
    failed: another exception was raised.
    """

    kind: FailureKind
    why: Text

    @classmethod
    def of(cls, kind: FailureKind, error: object) -> Failure:
        """Return the failure of an error. Its text is cut, and characters that UTF-8 cannot encode are replaced."""
        words = str(error) or type(error).__name__
        return cls(kind, words[:MOST_WORDS].encode("utf-8", "replace").decode())


class Unacceptable(ValueError):
    """The arguments do not fit the op, or the payload does not hold the described tensors."""


def encode_message(message: WireMessage) -> bytes:
    """Return a message as JSON. Raises Unacceptable if it is too long for a frame.

    The other end would treat a longer one as malformed and close the connection.
    """
    found = msgspec.json.encode(message)
    if len(found) > MOST_ARGUMENTS:
        raise Unacceptable(f"{len(found)} bytes of {type(message).__name__}; accepted: at most {MOST_ARGUMENTS}")
    return found


def decode_message(data: bytes, kind: type[T]) -> T:
    """Read a message of this type. Raises Unacceptable."""
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
    """Do the last layers answer a step with its logits as well? Logits are never asked for more than HEAD_ROWS rows."""
    return not step.rows_only and step.bucket <= HEAD_ROWS


def encode_step(step: Step) -> Stepped:
    return Stepped(
        tuple((segment.slot, segment.start, segment.count) for segment in step.segments), step.bucket, step.rows_only
    )


def decode_step(message: Stepped) -> Step:
    return Step(tuple(Segment(*segment) for segment in message.segments), message.bucket, message.rows_only)


@frozen
class Having:
    """The layout of a loaded shard's rows and positional states."""

    rows: RowSpec
    states: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, loaded: Loaded) -> Having:
        rows = loaded.rows
        states = tuple(TensorSpec(state.name, state.dtype, state.shape) for state in loaded.states)
        return cls(RowSpec(rows.names, rows.heads, rows.width, rows.dtype), states)
