"""Rows and states of slots over several shards, each of which has those of its own layers. Used by `Pipeline`."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve, field
from torch import Tensor

from adapters.models.decoder.pipeline.pipelined_chunks import use_device
from adapters.models.decoder.shard import NamedTensors, PositionalStates, Shard
from adapters.sequence_layout import RowSpec, TensorSpec


@define(eq=False)
class SplitRows:
    """The rows of slots over all parts. Only the parts can be addressed.

    The rows of a borrowed layer (`Crossing`) are in several parts. They are the same bits in all of them.
    """

    parts: Sequence[Shard]
    spec: RowSpec = field(init=False)
    is_addressable: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        names = tuple(dict.fromkeys(name for part in self.parts for name in part.rows.spec.names))
        self.spec = evolve(self.parts[0].rows.spec, names=names)

    def seat(self, slot: int, source: int, keep: int, pages: Sequence[int]) -> None:
        for part in self.parts:
            with use_device(part.spec.device):
                part.rows.seat(slot, source, keep, pages)

    def grow(self, slot: int, pages: Sequence[int]) -> None:
        for part in self.parts:
            with use_device(part.spec.device):
                part.rows.grow(slot, pages)

    def copy(self, source: int, target: int, count: int) -> None:
        for part in self.parts:
            part.rows.copy(source, target, count)

    def view(self, slot: int, start: int, stop: int) -> Tensor:
        raise ValueError(f"rows {start}..{stop} of slot {slot}: they are in the parts")

    def export(self, slot: int, start: int, stop: int) -> NamedTensors:
        return {name: rows for part in self.parts for name, rows in part.rows.export(slot, start, stop).items()}

    def import_(self, slot: int, start: int, rows: NamedTensors) -> None:
        check_names(rows, self.spec.names)
        for part in self.parts:
            if part.rows.spec.names:
                part.rows.import_(slot, start, {name: rows[name] for name in part.rows.spec.names})


@define(eq=False)
class SplitStates:
    """The positional states of slots over all parts that have any.

    Raises ValueError if parts keep their states at different multiples. Where no part has states, `default` says what
    the block is. is_split: there are several shards. A chunk may fail in one of them when another has settled it.
    """

    parts: Sequence[PositionalStates]
    default: PositionalStates
    is_split: bool
    specs: tuple[TensorSpec, ...] = field(init=False)
    block: int = field(init=False)
    checkpoint_count: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        if len({part.block for part in self.parts}) > 1:
            raise ValueError("the shards have their states at different multiples")
        self.specs = tuple(dict.fromkeys(spec for part in self.parts for spec in part.specs))
        self.block = (*self.parts, self.default)[0].block
        self.checkpoint_count = min((part.checkpoint_count for part in self.parts), default=0)

    @property
    def commits_per_segment(self) -> bool:
        return all(part.commits_per_segment for part in self.parts)

    @property
    def tree_obstacle(self) -> str:
        return next(filter(None, (part.tree_obstacle for part in self.parts)), "")

    @property
    def survives_failure(self) -> bool:
        return not self.is_split and all(part.survives_failure for part in self.parts)

    def copy(self, source: int, target: int) -> None:
        for part in self.parts:
            part.copy(source, target)

    def export(self, slot: int) -> NamedTensors:
        return {name: tensor for part in self.parts for name, tensor in part.export(slot).items()}

    def import_(self, slot: int, state: NamedTensors, at: int) -> None:
        check_names(state, [spec.name for spec in self.specs])
        for part in self.parts:
            part.import_(slot, {spec.name: state[spec.name] for spec in part.specs}, at)

    def keep(self, slot: int, checkpoint: int) -> None:
        for part in self.parts:
            part.keep(slot, checkpoint)

    def load(self, checkpoint: int, slot: int) -> None:
        for part in self.parts:
            part.load(checkpoint, slot)


def check_names(given: NamedTensors, expected: Sequence[str]) -> None:
    """Raise ValueError unless the tensors have exactly these names."""
    unexpected = sorted(set(expected).symmetric_difference(given))
    if unexpected:
        raise ValueError(f"{len(expected)} tensors of all parts: {unexpected[0]} is missing or not expected")
