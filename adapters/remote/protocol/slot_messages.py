"""The messages about rows and positional states of slots."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from adapters.remote.protocol.messages import MOST_RUNS, Count, LentRun, Lents, Tensors, WireMessage


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
    """The request to put rows into a slot. The tensors are in the payload, or in lent memory."""

    start: Count
    tensors: Tensors = ()
    lent: Lents = ()


class ImportRuns(OneSlot, frozen=True):
    """The request to copy runs of lent rows into a slot."""

    lent: Annotated[tuple[LentRun, ...], Meta(max_length=MOST_RUNS)]


class ImportState(OneSlot, frozen=True):
    """The request to put positional state into a slot. It stands at row `at`; its tensors are as in `ImportRows`."""

    at: Count
    tensors: Tensors = ()
    lent: Lents = ()


class SlotCheckpoint(OneSlot, frozen=True):
    """A slot, and a checkpoint of positional state that is copied from it or to it."""

    checkpoint: Count
