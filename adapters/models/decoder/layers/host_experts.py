"""Experts in host memory: the weights of all experts are pinned there, and those of often used ones are on the device.

Theory of operation
-------------------

The device has room for a number of experts. `RING` spots of it are for experts on their way, and the others are expert
slots. The core decides which experts have a slot, from the counts of `report`; `move_experts` copies them there.

A forward runs the router of a layer first, so it knows all experts of the layer before it multiplies with any. Experts
without a slot are copied to spots of the ring, on a CUDA stream of their own, while experts with a slot are
multiplied. Events order the copies and the kernels:

* `Spot.arrived` is recorded behind the copy into a spot. The kernels that read the spot wait for it.
* `Spot.left` is recorded behind the kernels that read a spot. The next copy into the spot waits for it.

All products run on the device, with the same kernels and shapes for all experts. So the slot of an expert's weights
does not change a bit of the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.kernels.interfaces.experts_interface import ChosenExperts, GatedWeights, StackedExperts
from adapters.models.kernels.offload import allocate_pinned, list_tensors, map_tensors

RING = 8  # spots for experts on their way: as many as one row of a step uses; 72 MiB for Qwen3-30B-A3B
EVERY = 32  # steps between two reports of used experts
_ALIGNED = 256


@frozen
class ExpertForm:
    """The layout of an expert's packed weights in a run of bytes. It is the same for all experts.

    tree: the weights as tensors without memory. size: of the run in bytes.
    """

    tree: Any
    size: int

    @classmethod
    def of(cls, weights: GatedWeights) -> ExpertForm:
        parts = list(list_tensors(weights))
        if any(part.layout is not torch.strided or not part.is_contiguous() for part in parts):
            raise ValueError("experts in host memory: these kernels pack weights in a form that cannot be copied")
        tree = map_tensors(weights, lambda part: torch.empty_like(part, device="meta"))
        return cls(tree, sum(_whole(part.nbytes) for part in parts))

    def view_expert(self, memory: Tensor) -> GatedWeights:
        """Return an expert whose weights are these bytes."""
        at = 0

        def view(part: Tensor) -> Tensor:
            nonlocal at
            start = at
            at = at + _whole(part.nbytes)
            return memory[start : start + part.nbytes].view(part.dtype).view(part.shape)

        found = map_tensors(self.tree, view)
        assert isinstance(found, GatedWeights)
        return found

    def stack_rows(self, memory: Tensor) -> StackedExperts:
        """Return the experts whose weights are the rows of `[n, size]` bytes, stacked."""
        rows = len(memory)

        def stack(first: Tensor) -> Tensor:
            apart = self.size // first.element_size()
            return first.as_strided((rows, *first.shape), (apart, *first.stride()))

        return StackedExperts(map_tensors(self.view_expert(memory[0]), stack))


def _whole(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


@define(eq=False)
class Spot:
    """Memory on the device for one expert. at: its number there.

    arrived: event behind the last copy into it. left: event behind the kernels that read it. Both are None on a CPU.
    """

    at: int
    memory: Tensor
    weights: GatedWeights
    arrived: torch.cuda.Event | None
    left: torch.cuda.Event | None


@define(eq=False)
class HostExperts:
    """The experts of one shard. Used on the thread of the lane, except for the sizes and figures.

    count: experts of a layer. room: bytes of the device for all spots. Experts are numbered through all layers, in the
    order in which these are added.
    """

    device: torch.device
    count: int
    room: int
    spots: list[Spot] = field(init=False, factory=list[Spot])
    where: dict[int, int] = field(init=False, factory=dict[int, int])  # expert -> expert slot
    needed: int = field(init=False, default=0)  # experts that all steps have used
    brought: int = field(init=False, default=0)  # those of them that had no slot
    moved: int = field(init=False, default=0)  # experts that were given a slot
    _form: ExpertForm | None = field(init=False, default=None)
    _stacked: StackedExperts | None = field(init=False, default=None)
    _layers: list[Tensor] = field(init=False, factory=list[Tensor])
    _ring: list[Spot] = field(init=False, factory=list[Spot])
    _turn: int = field(init=False, default=0)
    _uses: list[int] = field(init=False, factory=list[int])
    _asked: int = field(init=False, default=0)  # forwards of a layer since the last report
    _stream: torch.cuda.Stream | None = field(init=False, default=None)

    # --- loading ---

    def add_layer(self, experts: Iterable[GatedWeights]) -> ChosenExperts:
        """Copy the experts of one more layer to host memory. They may be on the device or on the host."""
        first = len(self._layers) * self.count
        memory = torch.empty(0)
        for number, weights in enumerate(experts):
            if self._form is None:
                self._form = ExpertForm.of(weights)
                self._make_room(self._form)
            if not number:
                memory = allocate_pinned(self.count * self._form.size)
            own = self._form.view_expert(memory[number * self._form.size :][: self._form.size])
            for target, source in zip(list_tensors(own), list_tensors(weights), strict=True):
                target.copy_(source)
        self._layers.append(memory)
        self._uses += [0] * self.count
        assert self._stacked is not None
        return LayerOfExperts(self, first, self._stacked)

    def _make_room(self, form: ExpertForm) -> None:
        ring = max(1, min(RING, self.room // form.size))
        expert_slots = max(0, self.room // form.size - ring)
        cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]
        memory = torch.empty(ring + expert_slots, form.size, dtype=torch.uint8, device=self.device)
        event = torch.cuda.Event if cuda else lambda: None
        made = [Spot(at, row, form.view_expert(row), event(), event()) for at, row in enumerate(memory)]
        self._ring = made[:ring]
        self.spots = made[ring:]
        self._stacked = form.stack_rows(memory)

    # --- what there is ---

    @property
    def experts(self) -> int:
        return len(self._layers) * self.count

    @property
    def expert_slots(self) -> int:
        return min(len(self.spots), self.experts)

    @property
    def device_bytes(self) -> int:
        return 0 if self._form is None else (len(self._ring) + len(self.spots)) * self._form.size

    @property
    def host_bytes(self) -> int:
        return sum(layer.nbytes for layer in tuple(self._layers))

    def build_figures(self) -> Mapping[str, int]:
        """Return the figures for `/props`."""
        return {
            "count": self.experts,
            "on_device": len(self.where),
            "expert_bytes": 0 if self._form is None else self._form.size,
            "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes,
            "needed": self.needed,
            "brought": self.brought,
            "moved": self.moved,
        }

    # --- moving ---

    def move_experts(self, moves: Iterable[tuple[int, int]]) -> None:
        """Copy experts to expert slots. moves: pairs (slot, expert). An expert that was there loses its slot.

        The copies wait for the steps that were launched before; later steps wait only for the experts that they use.
        """
        held = {expert_slot: expert for expert, expert_slot in self.where.items()}
        for expert_slot, expert in moves:
            if not (0 <= expert_slot < self.expert_slots and 0 <= expert < self.experts) or expert in self.where:
                raise ValueError(f"expert {expert} of {self.experts} to slot {expert_slot} of {self.expert_slots}")
            if (before := held.get(expert_slot)) is not None:
                del self.where[before]
            self.where[expert] = expert_slot
            held[expert_slot] = expert
            self.moved += 1
            self._copy(expert, self.spots[expert_slot], self._leaving(self.spots[expert_slot]))

    def _leaving(self, spot: Spot) -> torch.cuda.Event | None:
        """Record that kernels launched until now may still read the spot, and return the event."""
        if spot.left is not None:
            spot.left.record()
        return spot.left

    def _copy(self, expert: int, spot: Spot, after: torch.cuda.Event | None) -> None:
        layer, number = divmod(expert, self.count)
        assert self._form is not None
        source = self._layers[layer][number * self._form.size :][: self._form.size]
        if self._stream is None or spot.arrived is None or after is None:
            spot.memory.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            spot.memory.copy_(source, non_blocking=True)
            spot.arrived.record(self._stream)

    def fetch(self, first: int, numbers: Sequence[int]) -> Iterator[GatedWeights]:
        """Yield the weights of a layer's experts, in this order. first: the number of the layer's first expert.

        Experts without a slot begin to arrive before the first one is yielded. The kernels that read an expert must be
        launched before the next one is asked for.
        """
        wanted = [first + number for number in numbers]
        self._count(wanted)
        missing = deque(expert for expert in wanted if expert not in self.where)
        coming = deque(self._bring(missing.popleft()) for _ in range(min(len(missing), len(self._ring))))
        for expert in wanted:
            expert_slot = self.where.get(expert)
            spot = coming.popleft() if expert_slot is None else self.spots[expert_slot]
            if spot.arrived is not None:
                spot.arrived.wait()
            yield spot.weights
            if expert_slot is None:
                self._leaving(spot)
                if missing:
                    coming.append(self._bring(missing.popleft()))

    def fetch_in_turns(self, first: int, numbers: Sequence[int]) -> Iterator[dict[int, int]]:
        """Yield a layer's experts in groups: numbers within the layer, and numbers of their spots.

        Experts with a slot are the first group, while others arrive. The others follow in groups of half the ring, so
        that one group arrives while the group before it is read.
        """
        wanted = [first + number for number in numbers]
        self._count(wanted)
        missing = [expert for expert in wanted if expert not in self.where]
        half = max(1, len(self._ring) // 2)
        runs = deque(missing[at : at + half] for at in range(0, len(missing), half))
        coming = deque[list[tuple[int, Spot]]]()

        def more() -> None:
            if runs:
                coming.append([(expert, self._bring(expert)) for expert in runs.popleft()])

        for _ in range(len(self._ring) // half):
            more()
        there = [(expert, self.spots[self.where[expert]]) for expert in wanted if expert in self.where]
        if there:
            yield self._read(first, there)
        while coming:
            run = coming.popleft()
            yield self._read(first, run)
            for _, spot in run:
                self._leaving(spot)
            more()

    def _read(self, first: int, run: Iterable[tuple[int, Spot]]) -> dict[int, int]:
        """Let later kernels wait until these experts have arrived. Return the spots by numbers within the layer."""
        found = dict[int, int]()
        for expert, spot in run:
            if spot.arrived is not None:
                spot.arrived.wait()
            found[expert - first] = spot.at
        return found

    def _bring(self, expert: int) -> Spot:
        spot = self._ring[self._turn % len(self._ring)]
        self._turn += 1
        self._copy(expert, spot, spot.left)
        return spot

    # --- what was used ---

    def _count(self, wanted: Sequence[int]) -> None:
        self._asked += 1
        self.needed += len(wanted)
        for expert in wanted:
            self._uses[expert] += 1
            self.brought += expert not in self.where

    def report(self) -> tuple[int, ...]:
        """Return for every expert how many steps have used it since the last report; () before EVERY steps."""
        if self._asked < EVERY * len(self._layers):
            return ()
        uses = tuple(self._uses)
        self._uses = [0] * self.experts
        self._asked = 0
        return uses

    def close(self) -> None:
        """Give the memory back. The object cannot be used afterwards."""
        if self._stream is not None:
            self._stream.synchronize()
        self._layers.clear()
        self.spots.clear()
        self._ring.clear()
        self._stacked = None


class LayerOfExperts(ChosenExperts):
    """The experts of one layer. first: the number of its first expert."""

    def __init__(self, owner: HostExperts, first: int, stacked: StackedExperts) -> None:
        self._owner = owner
        self._first = first
        self.stacked = stacked

    def fetch(self, numbers: Sequence[int]) -> Iterator[GatedWeights]:
        return self._owner.fetch(self._first, numbers)

    def fetch_in_turns(self, numbers: Sequence[int]) -> Iterator[dict[int, int]]:
        return self._owner.fetch_in_turns(self._first, numbers)
