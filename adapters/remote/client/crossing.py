"""Requests that carry tensors to a daemon or back, for a target's layers and for a draft."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from adapters.models.decoder.shard import NamedTensors
from adapters.remote.client.peer import Peer
from adapters.remote.protocol.channel import ConnectionBroken
from adapters.remote.protocol.lent_memory import Lender
from adapters.remote.protocol.messages import (
    MOST_RUNS,
    Described,
    Lent,
    LentRun,
    Nothing,
    Op,
    T,
    Unacceptable,
    WireMessage,
)
from adapters.remote.protocol.payload_tensors import TensorBytes, describe_tensors, unpack_tensors
from adapters.remote.protocol.slot_messages import ImportRows, ImportRuns
from adapters.sequence_layout import RowSpec, TensorSpec


def describe_sent(
    lender: Lender | None, tensors: NamedTensors
) -> tuple[tuple[Described, ...], tuple[Lent, ...], NamedTensors]:
    """Return the descriptions of tensors in the payload and in lent memory, and the tensors that must be sent.

    Either all tensors are lent and none is sent, or all are sent.
    """
    lent = () if lender is None else lender.locate(tensors)
    return ((), lent, {}) if lent else (describe_tensors(tensors), (), tensors)


def import_rows(peer: Peer, slot: int, start: int, rows: NamedTensors) -> None:
    tensors, lent, sent = describe_sent(peer.lender, rows)
    peer.ask(Op.IMPORT_ROWS, ImportRows(slot, start, tensors, lent), Nothing, list(sent.values()))


def import_runs(
    peer: Peer, slot: int, spec: RowSpec, runs: Sequence[tuple[int, Tensor]], keep: Sequence[object]
) -> None:
    """Copy runs of rows into a slot of a daemon.

    runs: start positions, and rows `[names, heads, rows, width]` of `spec`. Runs in lent memory are posted, at most
    MOST_RUNS in one request; the others are sent. keep: the owners of the memory, which are kept until the daemon has
    answered.
    """
    lender = peer.lender
    seen = list[LentRun]()
    for start, rows in runs:
        if lender is not None and (lent := lender.run(spec, start, rows)) is not None:
            seen.append(lent)
        else:
            import_rows(peer, slot, start, dict(zip(spec.names, rows, strict=True)))
    for at in range(0, len(seen), MOST_RUNS):
        batch = tuple(seen[at : at + MOST_RUNS])
        peer.post(Op.IMPORT_RUNS, ImportRuns(slot, batch), keep, spec.token_bytes * sum(run.count for run in batch))


def describe_specs(specs: Sequence[TensorSpec]) -> tuple[Described, ...]:
    return tuple(Described(spec.name, spec.dtype, spec.shape) for spec in specs)  # type: ignore[arg-type]


def ask_tensors(
    peer: Peer, op: Op, message: WireMessage, kind: type[T], *, sent: NamedTensors, expected: tuple[Described, ...]
) -> tuple[T, TensorBytes]:
    """Ask for tensors. They must be read before the next request, so the caller holds `peer.lock` until then.

    expected: their descriptions, in order. Other tensors end the connection and raise RowsLost. Raises as `Peer.ask`
    does.
    """
    done, frame = peer.ask(op, message, kind, list(sent.values()))
    try:
        found = unpack_tensors(done.tensors, frame.payload)  # type: ignore[attr-defined]
    except Unacceptable as error:
        raise peer.lose(ConnectionBroken(str(error))) from error
    if found.tensors != expected:
        raise peer.lose(ConnectionBroken("it answered with other tensors than were asked for"))
    return done, found
