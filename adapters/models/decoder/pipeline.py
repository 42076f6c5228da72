"""A target's shards in the order of their layers, run as one: what each leaves is what the next one begins with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import torch
from attrs import evolve
from torch import Tensor

from adapters.models.decoder.pipelined_chunks import SPAN, Waves, current
from adapters.models.decoder.shard import Kept, NamedTensors, OutputHead, Shard, TargetHead
from adapters.models.kernels.step import Forward, Step
from adapters.sequence_layout import RowSpec, TensorSpec


class Pipeline:
    """A run of layers over any number of shards, as one shard. A target on a single device is a pipeline of one.

    Logits are on the device of the last shard, and so is whatever a draft reads: `device` is that one. Of slots, rows
    and buckets the shards must have the same numbers; where their kernels' tiles differ, the shortest slot counts. Rows
    are moved part by part, so only `parts` are asked where they are.
    """

    def __init__(self, parts: Sequence[Shard]) -> None:
        self._parts = tuple(parts)
        if not parts or any(one.layers.stop != other.layers.start for one, other in pairwise(parts)):
            raise ValueError(f"shards of layers {[part.layers for part in parts]} are no run of layers")
        for name in ("slots", "buckets", "vocab_size", "dtype"):
            values = [getattr(part, name) for part in parts]
            if any(value != values[0] for value in values):
                raise ValueError(f"{name} differ among the shards: {values}")
        self._stateful = tuple(part for part in self._parts if part.state_specs)
        if len({part.state_block for part in self._stateful}) > 1:
            raise ValueError("the shards have their states at different multiples")
        self._embedding: Tensor | None = None  # a copy beside the head, where another device has it
        self._waves = Waves(self._parts, self.device)

    # --- what it is ---

    @property
    def parts(self) -> tuple[Shard, ...]:
        return self._parts

    @property
    def layers(self) -> range:
        return range(self._parts[0].layers.start, self._parts[-1].layers.stop)

    @property
    def slots(self) -> int:
        return self._parts[0].slots

    @property
    def capacity(self) -> int:
        return min(part.capacity for part in self._parts)

    @property
    def buckets(self) -> tuple[int, ...]:
        return self._parts[0].buckets

    @property
    def vocab_size(self) -> int:
        return self._parts[0].vocab_size

    @property
    def device(self) -> torch.device:
        return self._parts[-1].device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Of the parts, each once."""
        return tuple(dict.fromkeys(part.device for part in self._parts))

    @property
    def dtype(self) -> torch.dtype:
        return self._parts[0].dtype

    @property
    def runs_ahead(self) -> bool:
        return all(part.runs_ahead for part in self._parts)

    @property
    def embedding(self) -> Tensor:
        return self._parts[0].embedding

    @property
    def output(self) -> OutputHead:
        return self._parts[-1].output

    @property
    def head(self) -> TargetHead:
        """Where the embedding is on another device than the head, with a copy of it, which `memory` charges."""
        own, output = self._parts[0].embedding, self.output
        if self._embedding is None and self._parts[0].device != self._parts[-1].device:
            self._embedding = own.to(output.norm.device)
        return TargetHead(own if self._embedding is None else self._embedding, output.packed, output.norm)

    @property
    def row_spec(self) -> RowSpec:
        names = tuple(name for part in self._parts for name in part.row_spec.names)
        return evolve(self._parts[0].row_spec, names=names)

    @property
    def state_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for part in self._stateful for spec in part.state_specs)

    @property
    def state_block(self) -> int:
        return (*self._stateful, self._parts[0])[0].state_block

    @property
    def state_places(self) -> int:
        return min((part.state_places for part in self._stateful), default=0)

    # --- steps ---

    def forward(self, step: Step, inputs: Tensor) -> Forward:
        """A shard that fails takes back what those before it have settled."""
        if len(self._parts) == 1:
            with current(self.device):
                return self._parts[0].forward(step, inputs)
        found: dict[int, Tensor] = {}
        with ExitStack() as settled:
            for part in self._parts[:-1]:
                settled.enter_context(part.settling(step))
            for part in self._parts:
                with current(part.device):
                    left = part.forward(step, inputs)
                inputs = left.hidden
                found |= {layer: hidden.to(self.device) for layer, hidden in left.aux_hidden_states.items()}
        return Forward(inputs, found)

    @property
    def span(self) -> int:
        """Chunks that one prefill may be of: more than one where shards compute side by side, or the only one need not
        wait for the host between two of them.
        """
        return SPAN if self._waves.beside or self.ahead else 1

    @property
    def ahead(self) -> bool:
        """Is a chunk launched before the one before it is done?"""
        return len(self._parts) == 1 and self._parts[0].runs_ahead

    def prefill(self, chunks: Iterable[tuple[Step, Tensor]]) -> Iterator[Forward]:
        """`forward` of steps of `rows_only`, side by side; see `Waves`. A single shard is only told of them."""
        return (self.forward(*chunk) for chunk in chunks) if len(self._parts) == 1 else self._waves.run(chunks)

    @contextmanager
    def settling(self, step: Step) -> Iterator[None]:
        with ExitStack() as settled:
            for part in self._parts:
                settled.enter_context(part.settling(step))
            yield

    def commit(self, step: Step, kept: Sequence[Kept]) -> None:
        for part in self._parts:
            with current(part.device):
                part.commit(step, kept)

    def logits(self, step: Step, hidden: Tensor) -> Tensor:
        with current(self.device):
            return self._parts[-1].logits(step, hidden)

    def synchronize(self) -> None:
        for part in self._parts:
            part.synchronize()

    # --- rows and states ---

    def copy_rows(self, source: int, target: int, count: int) -> None:
        for part in self._parts:
            part.copy_rows(source, target, count)

    def seat(self, slot: int, source: int, keep: int, pages: Sequence[int]) -> None:
        for part in self._parts:
            with current(part.device):
                part.seat(slot, source, keep, pages)

    def grow(self, slot: int, pages: Sequence[int]) -> None:
        for part in self._parts:
            with current(part.device):
                part.grow(slot, pages)

    def copy_state(self, source: int, target: int) -> None:
        for part in self._stateful:
            part.copy_state(source, target)

    @property
    def addressed(self) -> bool:
        return False

    def rows(self, slot: int, start: int, stop: int) -> Tensor:
        raise ValueError(f"rows {start}..{stop} of slot {slot}: they are in the parts")

    def export_rows(self, slot: int, start: int, stop: int) -> NamedTensors:
        return {name: one for part in self._parts for name, one in part.export_rows(slot, start, stop).items()}

    def import_rows(self, slot: int, start: int, rows: NamedTensors) -> None:
        check_names(rows, self.row_spec.names)
        for part in self._parts:
            if part.row_spec.names:
                part.import_rows(slot, start, {name: rows[name] for name in part.row_spec.names})

    def export_state(self, slot: int) -> NamedTensors:
        return {name: one for part in self._stateful for name, one in part.export_state(slot).items()}

    def import_state(self, slot: int, state: NamedTensors) -> None:
        check_names(state, [spec.name for spec in self.state_specs])
        for part in self._stateful:
            part.import_state(slot, {spec.name: state[spec.name] for spec in part.state_specs})

    def keep_state(self, slot: int, place: int) -> None:
        for part in self._stateful:
            part.keep_state(slot, place)

    def load_state(self, place: int, slot: int) -> None:
        for part in self._stateful:
            part.load_state(place, slot)

    # --- memory ---

    def memory(self) -> Mapping[str, int]:
        """Of all parts, on whatever device."""
        parts = [part.memory() for part in self._parts]
        total = {name: sum(part[name] for part in parts) for name in parts[0]}
        copied = 0 if self._embedding is None else self._embedding.nbytes
        return {**total, "weights": total["weights"] + copied}

    def close(self) -> None:
        self._embedding = None
        self._waves.close()
        for part in self._parts:
            part.close()


def check_names(given: NamedTensors, own: Sequence[str]) -> None:
    """Raises ValueError for names that are not exactly ours."""
    odd = sorted(set(own).symmetric_difference(given))
    if odd:
        raise ValueError(f"{len(own)} tensors of all parts: {odd[0]} is odd")
