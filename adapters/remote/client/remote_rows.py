"""Rows and positional states of slots in another process: every call is one question to its daemon.

Used by `RemoteShard`. `RemoteDraftRows` (`remote_draft_rows.py`) does the same for a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen
from torch import Tensor

from adapters.models.decoder.shard import NamedTensors
from adapters.remote.client.crossing import ask_tensors, describe_sent, describe_specs, import_rows, import_runs
from adapters.remote.client.peer import Peer
from adapters.remote.protocol.messages import Exported, Nothing, Op, WireMessage
from adapters.remote.protocol.slot_messages import CopyRows, CopyState, ImportState, OneSlot, RowSpan, SlotCheckpoint
from adapters.sequence_layout import RowSpec, TensorSpec


@frozen(eq=False)
class RemoteRows:
    """The rows of a shard in another process. They have no addresses here, and no pages."""

    peer: Peer
    spec: RowSpec
    is_addressable: bool = False

    def seat(self, slot: int, source: int, keep: int, pages: Sequence[int]) -> None:
        raise ValueError(
            f"slot {slot}, {keep} rows of {source}, {len(pages)} pages: slots of another process share none"
        )

    def grow(self, slot: int, pages: Sequence[int]) -> None:
        raise ValueError(f"slot {slot}, {len(pages)} pages: slots of another process share none")

    def copy(self, source: int, target: int, count: int) -> None:
        self.peer.ask(Op.COPY_ROWS, CopyRows(source, target, count), Nothing)

    def view(self, slot: int, start: int, stop: int) -> Tensor:
        raise ValueError(f"rows {start}..{stop} of slot {slot}: they are in another process")

    def export(self, slot: int, start: int, stop: int) -> NamedTensors:
        specs = self.spec.tensor_specs(max(0, stop - start))
        return ask_for_tensors(self.peer, Op.EXPORT_ROWS, RowSpan(slot, start, stop), specs)

    def import_(self, slot: int, start: int, rows: NamedTensors) -> None:
        import_rows(self.peer, slot, start, rows)

    def import_runs(self, slot: int, runs: Sequence[tuple[int, Tensor]], keep: Sequence[object]) -> None:
        """Send runs of rows without waiting for an answer. A failure is reported as that of a commit is."""
        import_runs(self.peer, slot, self.spec, runs, keep)


@frozen(eq=False)
class RemoteStates:
    """The positional states of a shard in another process, and its checkpoints."""

    peer: Peer
    specs: tuple[TensorSpec, ...]
    block: int
    checkpoint_count: int
    commits_per_segment: bool = False
    survives_failure: bool = False  # it is not known here

    @property
    def tree_obstacle(self) -> str:
        return "layers with a window or a state are in another process" if self.specs else ""

    def copy(self, source: int, target: int) -> None:
        self.peer.ask(Op.COPY_STATE, CopyState(source, target), Nothing)

    def export(self, slot: int) -> NamedTensors:
        return ask_for_tensors(self.peer, Op.EXPORT_STATE, OneSlot(slot), self.specs)

    def import_(self, slot: int, state: NamedTensors, at: int) -> None:
        tensors, lent, sent = describe_sent(self.peer.lender, state)
        self.peer.ask(Op.IMPORT_STATE, ImportState(slot, at, tensors, lent), Nothing, list(sent.values()))

    def keep(self, slot: int, checkpoint: int) -> None:
        self.peer.ask(Op.KEEP_STATE, SlotCheckpoint(slot, checkpoint), Nothing)

    def load(self, checkpoint: int, slot: int) -> None:
        self.peer.ask(Op.LOAD_STATE, SlotCheckpoint(slot, checkpoint), Nothing)


def ask_for_tensors(peer: Peer, op: Op, message: WireMessage, specs: Sequence[TensorSpec]) -> NamedTensors:
    """Ask for exactly these tensors and return copies of them, since the answer's memory is used again."""
    with peer.lock:
        _, found = ask_tensors(peer, op, message, Exported, sent={}, expected=describe_specs(specs))
        return {name: tensor.clone() for name, tensor in found.views().items()}
