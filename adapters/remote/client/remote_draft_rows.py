"""The context rows of a draft in another process, and which of them that process is known to have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import define, field
from torch import Tensor

from adapters.device.slots.slots import add_span
from adapters.models.decoder.shard import NamedTensors
from adapters.remote.client.crossing import ask_tensors, describe_sent, describe_specs
from adapters.remote.client.peer import Peer
from adapters.remote.protocol.channel import ConnectionBroken
from adapters.remote.protocol.messages import Exported, Nothing, Op, T, WireMessage
from adapters.remote.protocol.slot_messages import ImportRows, RowSpan
from adapters.sequence_layout import RowSpec
from effects.ids import Span
from effects.ports import RowsLost


class AskDaemon(Protocol):
    """Asks the daemon of a draft. Raises RowsLost, torch.OutOfMemoryError, or ValueError for what it refuses."""

    def __call__(self, op: Op, message: WireMessage, kind: type[T], tensors: NamedTensors | None = None) -> T: ...


@define(eq=False)
class RemoteDraftRows:
    """Context rows in another process. They have no addresses here.

    location: the name of that process, for messages. ask: asks its daemon. flush: sends the rows that wait for the next
    question, so that the process has them.
    """

    peer: Peer
    spec: RowSpec
    location: str
    ask: AskDaemon
    flush: Callable[[], None]
    is_addressable: bool = False
    _held: dict[int, tuple[Span, ...]] = field(factory=dict)  # by slot, the rows that it has or will soon be sent

    def add_held_rows(self, slot: int, start: int, stop: int) -> None:
        """Note that the process has these rows of the slot, or gets them with the next question."""
        self._held[slot] = add_span(self._held.get(slot, ()), start, stop)

    def has_rows(self, slot: int, start: int, stop: int) -> bool:
        return any(first <= start and stop <= last for first, last in self._held.get(slot, ()))

    def find_context_start(self, slot: int, first: int, position: int) -> int:
        """Return where the unbroken rows before `position` begin, but not below `first`. Without any: `position`."""
        begins = [start for start, stop in self._held.get(slot, ()) if start < position <= stop]
        return max(first, begins[0]) if begins else position

    def forget(self) -> None:
        """Forget all rows: the process that had them is gone, or what it has is unknown."""
        self._held.clear()

    def view(self, slot: int, start: int, stop: int) -> Tensor:
        raise ValueError(f"rows {start}..{stop} of slot {slot}: they are in another process")

    def export(self, slot: int, start: int, stop: int) -> NamedTensors:
        """Return rows on the host. Raises RowsLost for rows that the present process does not have."""
        self.flush()
        if not self.has_rows(slot, start, stop):
            raise RowsLost((), f"{self.location} has no rows {start}..{stop} of slot {slot}")
        with self.peer.lock:
            try:
                message = RowSpan(slot, start, stop)
                expected = describe_specs(self.spec.tensor_specs(stop - start))
                _, found = ask_tensors(self.peer, Op.EXPORT_ROWS, message, Exported, sent={}, expected=expected)
            except ValueError as error:
                raise RowsLost((), f"{self.location}: {error}") from error
            except RuntimeError as error:
                raise self.peer.lose(ConnectionBroken(f"export_rows: {error}")) from error
            return {name: tensor.clone() for name, tensor in found.views().items()}

    def import_runs(self, slot: int, runs: Sequence[tuple[int, Tensor]], _: Sequence[object]) -> None:
        self.flush()
        for start, rows in runs:
            tensors, lent, sent = describe_sent(self.peer.lender, dict(zip(self.spec.names, rows, strict=True)))
            self.ask(Op.IMPORT_ROWS, ImportRows(slot, start, tensors, lent), Nothing, sent)
            self.add_held_rows(slot, start, start + rows.shape[2])
