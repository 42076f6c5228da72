"""The positional state of recurrent layers in tensors of this process: `PositionalStates` for a `DenseShard`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain

import torch
from attrs import astuple, frozen
from torch import Tensor

from adapters.models.decoder.shard import Kept, NamedTensors
from adapters.models.kernels.interfaces.delta_interface import (
    CHUNK,
    TAPS,
    DeltaKernels,
    DeltaShape,
    DeltaState,
    LayerStates,
)
from adapters.models.kernels.step import UNSETTLED, Step
from adapters.sequence_layout import TensorSpec, dtype_name, torch_dtype

_NOTHING = nullcontext()


@frozen
class Standing:
    """The position of a slot's state.

    base: the number of rows that the state contains, a multiple of 64.
    rows: rows behind it. Settled ones are at most 63, and a 64th may wait for `commit`. The layers hold what these rows
    will change in the state.
    """

    base: int
    rows: int = 0


class RecurrentCache:
    """The states of layers with the gated delta rule, in tensors that their kernels make.

    names: of the layers, as in `layers.12`. Without such a layer there is no state, and any step may start anywhere.
    """

    block = CHUNK
    survives_failure = True

    def __init__(
        self,
        names: Sequence[str],
        shape: DeltaShape | None,
        kernels: DeltaKernels | None,
        *,
        slots: int,
        checkpoint_count: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if names and (shape is None or kernels is None):
            raise ValueError("these kernels have no operations for recurrent layers")
        self.slots = slots
        self.checkpoint_count = checkpoint_count if names else 0
        self._kernels = kernels
        self._states: LayerStates | None = None
        specs = list[TensorSpec]()
        if names and shape is not None and kernels is not None:
            count = len(names)
            whole = kernels.make_state(shape, count * slots, count * checkpoint_count, dtype, device)
            self._states = LayerStates.of_layers(whole, count)
            memory = (shape.value_heads, shape.key_size, shape.value_size)
            for name in names:
                specs.append(TensorSpec(f"{name}.conv", dtype_name(dtype), (TAPS - 1, shape.channels)))
                specs.append(TensorSpec(f"{name}.memory", "F32", memory))
        self.specs = tuple(specs)
        self._standing = [Standing(0)] * slots
        self._kept = [Standing(0)] * checkpoint_count

    @property
    def layers(self) -> tuple[DeltaState, ...]:
        """The states of each layer, in order."""
        return () if self._states is None else self._states.layers

    @property
    def commits_per_segment(self) -> bool:
        return self._kernels is not None and self._kernels.commits_per_segment

    @property
    def tree_obstacle(self) -> str:
        return "each node of a tree would need a state of its own in recurrent layers" if self.layers else ""

    @property
    def nbytes(self) -> int:
        return (
            0 if self._states is None else sum(tensor.nbytes for tensor in astuple(self._states.whole, recurse=False))
        )

    # --- steps ---

    def start(self, step: Step) -> tuple[int, ...]:
        """Return where the state of each segment's slot stands, and forget the slot's rows from the segment's start on.

        Raises ValueError for a step that cannot continue from there.
        """
        if not self.layers:
            return (0,) * len(step.segments)
        if step.branches:
            raise ValueError("a tree: each of its nodes would need a recurrent state of its own")
        bases = tuple(self._base(segment.slot, segment.start) for segment in step.segments)
        for segment in step.segments:
            if segment.count > UNSETTLED and not step.rows_only and not self.commits_per_segment:
                rows = f"{segment.count} rows of slot {segment.slot}"
                raise ValueError(f"{rows} in a step that may be rolled back; accepted: at most {UNSETTLED}")
        for segment, base in zip(step.segments, bases, strict=True):
            if not segment.start:
                for tensor in self._view_states(segment.slot):
                    tensor.zero_()
            self._standing[segment.slot] = Standing(base, segment.start - base)
        return bases

    def _base(self, slot: int, start: int) -> int:
        """Return where the state stands that a forward of the slot continues from if it starts at `start`."""
        if not start:
            return 0
        standing = self._standing[slot]
        base = standing.base
        if not base <= start <= base + standing.rows:
            raise ValueError(
                f"slot {slot} has its state at {standing.base}, with {standing.rows} rows behind it; "
                f"nothing continues from {start}"
            )
        return base

    def settling(self, step: Step) -> AbstractContextManager[None]:
        """Return a context for a forward. Segments that settle move their states as it runs.

        If the forward raises, the state of one such segment is put back, and of several nothing continues. Otherwise
        all rows of these segments are settled.
        """
        return self._settling(step) if self.layers and any(map(step.settles, step.segments)) else _NOTHING

    def restoring(self, step: Step) -> AbstractContextManager[None]:
        """Return a context that does for a step that fails, here or in a later shard, what `settling` does."""
        return self._restoring(step) if self.layers and any(map(step.settles, step.segments)) else _NOTHING

    @contextmanager
    def _settling(self, step: Step) -> Iterator[None]:
        with self._restoring(step):
            yield
        for segment in filter(step.settles, step.segments):
            stop = segment.start + segment.count
            # The last row of a step that decodes may be rolled back, so its state stands before that row.
            last = stop if step.rows_only else stop - 1
            self._standing[segment.slot] = Standing(last - last % CHUNK, stop - last + last % CHUNK)

    @contextmanager
    def _restoring(self, step: Step) -> Iterator[None]:
        """Put the state of a segment that settles back if the step fails.

        Of several such segments no state is put back, and their slots have to begin anew: a caller that lets several
        prompts share a forward gives all of them up if it fails. So a step copies the state of one slot at most, and
        a GPU's reserve has room for that (`SPARE` in `engine/loading/memory_estimate.py`).
        """
        segments = [*filter(step.settles, step.segments)]
        bases = [self._base(segment.slot, segment.start) for segment in segments]
        own = list[Tensor]()
        if len(segments) == 1 and segments[0].start:
            slot = segments[0].slot
            own = self._view_slot(slot) if segments[0].start > bases[0] else self._view_states(slot)
        saved = [tensor.clone() for tensor in own]
        try:
            yield
        except BaseException:
            copy_together(own, saved)
            for segment, base in zip(segments, bases, strict=True):
                self._standing[segment.slot] = (
                    Standing(base, segment.start - base) if len(segments) == 1 else Standing(0)
                )
            raise

    def commit(self, step: Step, kept: Sequence[Kept]) -> None:
        if self._kernels is None or self._states is None or step.rows_only:
            return
        for segment, keep in zip(step.segments, kept, strict=True):
            base = self._standing[segment.slot].base
            rows = segment.start - base + (keep if isinstance(keep, int) else len(keep))
            if rows < 0:
                raise ValueError(f"slot {segment.slot} has its state at {base} already; {-rows} more rows are kept")
            if rows >= CHUNK:
                self._kernels.advance_state(self._states, segment.slot, base)
                base = base + CHUNK
                rows = rows - CHUNK
            self._standing[segment.slot] = Standing(base, rows)

    # --- states ---

    def copy(self, source: int, target: int) -> None:
        """Let slot `target` continue from wherever slot `source` may continue."""
        copy_together(self._view_slot(target), self._view_slot(source))
        self._standing[target] = self._standing[source]

    def keep(self, slot: int, checkpoint: int) -> None:
        self._move(slot, self._check_number(checkpoint))
        self._kept[checkpoint] = Standing(self._standing[slot].base)

    def load(self, checkpoint: int, slot: int) -> None:
        self._move(self._check_number(checkpoint), slot)
        self._standing[slot] = self._kept[checkpoint]

    def _check_number(self, checkpoint: int) -> int:
        if not 0 <= checkpoint < self.checkpoint_count:
            raise ValueError(f"checkpoint {checkpoint} is not one of {self.checkpoint_count}")
        return self.slots + checkpoint

    def _move(self, source: int, target: int) -> None:
        copy_together(self._view_states(target), self._view_states(source))

    def _view_states(self, slot: int) -> list[Tensor]:
        """Return the state of a slot or checkpoint, as two tensors `[layers, ...]`."""
        return (
            []
            if self._states is None
            else [exported_tensor[:, slot] for exported_tensor in get_exported_tensors(self._states.stacked)]
        )

    def _view_slot(self, slot: int) -> list[Tensor]:
        """Return the state of a slot and the rows behind it, as tensors `[layers, ...]`."""
        tensors = () if self._states is None else astuple(self._states.stacked, recurse=False)
        return [tensor[:, slot] for tensor in tensors if tensor.numel()]

    def export(self, slot: int) -> NamedTensors:
        """Return copies of the slot's state on its device."""
        copies = [tensor.clone() for tensor in self._view_states(slot)]
        of_layers = zip(*(copy.unbind(0) for copy in copies), strict=True)
        return {spec.name: tensor for spec, tensor in zip(self.specs, chain.from_iterable(of_layers), strict=True)}

    def import_(self, slot: int, state: NamedTensors, at: int) -> None:
        """Write a state that `export` returned, of the first `at` rows. Raises ValueError for one that cannot be."""
        check_state(self.specs, state, at)
        given = [state[spec.name] for spec in self.specs]
        copy_together([tensor[slot] for layer in self.layers for tensor in get_exported_tensors(layer)], given)
        hold_memory(given)
        self._standing[slot] = Standing(at)

    def close(self) -> None:
        """Give the memory back."""
        self._states = None


def get_exported_tensors(state: DeltaState) -> tuple[Tensor, Tensor]:
    """Return the two tensors that are exported of a layer, in the order of `RecurrentCache.specs`."""
    return state.conv, state.memory


def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into the target of the same number. On one device, tensors of a dtype share few launches."""
    groups = dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]]()
    for target, source in zip(targets, sources, strict=True):
        left, right = groups.setdefault((source.dtype, source.device), ([], []))
        left.append(target)
        right.append(source)
    for left, right in groups.values():
        torch._foreach_copy_(left, right)


def hold_memory(tensors: Iterable[Tensor]) -> None:
    """Let no other stream use the memory of these tensors again before the current stream has read them."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def check_state(specs: Sequence[TensorSpec], state: NamedTensors, at: int) -> None:
    """Raise ValueError unless a state consists of these tensors and may stand at row `at`."""
    if at < 0 or at % CHUNK:
        raise ValueError(f"a state at row {at}: states stand at multiples of {CHUNK}")
    unexpected = sorted({spec.name for spec in specs}.symmetric_difference(state))
    if unexpected:
        raise ValueError(f"state of {len(specs)} tensors: {unexpected[0]} is missing or not expected")
    for spec in specs:
        tensor = state[spec.name]
        dtype = torch_dtype(spec.dtype)
        if tensor.shape != spec.shape or tensor.dtype != dtype:
            raise ValueError(f"{spec.name}: {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(spec.shape)}")
