"""The base class of draft models: a cache of context rows, weights that can be offloaded, and proposals.

A draft follows its target. `extend` computes the draft's context rows from hidden states that the target's forward
left. `propose` predicts the tokens that come next.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.decoder.cache.kv_cache import KvCache
from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.decoder.pipeline.pipelined_chunks import use_device
from adapters.models.decoder.shard import TargetHead
from adapters.models.drafts.draft_parts import DraftPlacement, DraftShape, DraftWeights, LaunchPicks
from adapters.models.kernels.formats.row_format import RowLayout, row_types
from adapters.models.kernels.interfaces.decode_pass import DecodePass, DraftPass
from adapters.models.kernels.interfaces.layer_interface import Kernels, Rope
from adapters.models.kernels.offload import OffloadableWeights, State
from adapters.models.kernels.step import Segment, Step


class NotLoaded(RuntimeError):
    """A forward was requested from a draft whose weights are offloaded or released."""


@frozen
class BlockRequest:
    """A request for `count` proposals that follow `token` in a slot.

    Context rows `[first, position)` are valid. `token` is the slot's last one. The target has not processed it yet; it
    will be at `position`. The proposals are for `position + 1` and the positions after it.
    """

    slot: int
    first: int
    position: int
    token: int
    count: int


# Chooses the tokens that are proposed. For each request in turn it gets float32 logits `[n, V]` of the next n
# positions, and it returns n tokens for each; n may be 0. A draft that predicts a whole block calls it once. One that
# continues from the chosen token calls it once for each position. The logits may be static buffers.
ChooseTokens: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Sequence[int]]]


# The target's own head, or a function that copies it to another device.
AnyHead: TypeAlias = TargetHead | Callable[[], TargetHead]
L = TypeVar("L")
# The weights that a draft offloads: its own, and its copy of the head if the target's is on another device.
HeldWeights: TypeAlias = tuple[L, tuple[TargetHead, ...]]


class CachedDraft(ABC, Generic[L]):
    """A draft model with a cache of context rows. It is called on the lane's thread only. L: the loaded weights' type.

    kernels: an instance of its own, of its device's kind. head: what it shares with the target, on the same device and
    in the same dtype; or makes copies for its own device, which come and go with its weights. A slot holds as many rows
    as `placement` says, and has room for what is proposed behind them.

    rows: the context rows of the slots, one for each row of the target.
    """

    def __init__(
        self,
        shape: DraftShape,
        weights: DraftWeights,
        kernels: Kernels,
        head: AnyHead,
        placement: DraftPlacement | None = None,
    ) -> None:
        placement = DraftPlacement() if placement is None else placement
        self._shape = shape
        self._kernels = kernels
        self._target = head
        self._device = placement.device
        self._dtype = placement.dtype
        self._buckets = tuple(sorted(placement.buckets))
        _check_arguments(shape, placement)
        count = count_cache_rows(placement.capacity, shape.block, kernels.kv_tile)
        self._ropes = self._make_ropes(count)
        names = [f"draft.layers.{layer}" for layer in range(shape.num_layers)]
        size = (placement.slots, shape.num_kv_heads, count, shape.head_dim)
        row = RowLayout(row_types(self._dtype), shape.head_dim, latent=self.keeps_latents)
        device = self._device
        self.rows = KvCache(names, size, dtype=self._dtype, device=device, capacity=placement.capacity, layout=row)
        self._make_buffers()
        self._offloadable: OffloadableWeights[HeldWeights[L]] = OffloadableWeights(
            partial(self._read_weights, weights), self._device
        )
        self._offloadable.load_back()
        self._try_forwards()
        facts = (weights.digest(), shape.row_facts(), str(self._dtype), kernels.bit_signature)
        self.identity = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    def _read_weights(self, weights: DraftWeights) -> HeldWeights[L]:
        with use_device(self._device):
            head = self._target if isinstance(self._target, TargetHead) else self._target()
            self._check_head(head)
            loaded = self._load_weights(WeightReader(weights, self._device, self._dtype), weights, head)
        return loaded, () if head is self._target else (head,)

    def _check_head(self, head: TargetHead) -> None:
        """Check that the draft can use this head. Raises ValueError."""
        if head.embedding.shape[1] != self._shape.hidden_size or head.embedding.dtype != self._dtype:
            found = f"{head.embedding.dtype} {list(head.embedding.shape)}"
            raise ValueError(f"the target's embedding is {found}, not {self._dtype} of {self._shape.hidden_size}")

    def _try_forwards(self) -> None:
        """Run each kind of forward once, over zeros. Kernels that cannot run the draft raise ValueError here."""
        bucket = self._buckets[0]
        nothing = torch.zeros(bucket, self._tap_width, dtype=self._dtype, device=self._device)
        step = Step((Segment(0, 0, 1),), bucket)
        self.extend(step, torch.zeros(1, dtype=torch.int64), dict.fromkeys(self.aux_layers, nothing))
        self.propose([BlockRequest(0, 0, 1, 0, 1)], pick_first_tokens)

    # --- the methods of each kind of draft ---

    @abstractmethod
    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None:
        """Write the context rows of the step's rows, at their slots and positions. Later rows need not be removed.

        tokens: of these rows, int64 `[rows]` on the host. aux_hidden_states: for each auxiliary layer the output that
        the target's forward of the same step left, `[bucket, D]`.
        """

    @abstractmethod
    def extend_projected(self, step: Step, tokens: Tensor, features: Tensor) -> None:
        """Do the same with the features `[rows, D]` that a `Projection` has computed; they may be on any device."""

    @abstractmethod
    def propose(self, requests: Sequence[BlockRequest], pick: ChooseTokens) -> None:
        """Compute logits for up to `count` proposals of each request. `pick` gets the logits and chooses the tokens."""

    def launch_proposals(self, requests: Sequence[BlockRequest], pick: LaunchPicks) -> Tensor | None:  # noqa: ARG002
        """Do the same without waiting for a pick. Return int64 `[requests, most]`; None if that is not possible."""
        return None

    def build_draft_pass(self, count: int, target: DecodePass) -> DraftPass | None:  # noqa: ARG002 - a default
        """Return what proposes `count` tokens within a decode step of the compiled library; None if nothing does."""
        return None

    @abstractmethod
    def list_rehearsals(self, slots: int, rows: int) -> Iterator[list[BlockRequest]]:
        """Return batches of requests that, proposed to in turn, run every shape that serving is likely to need.

        slots: the most requests of a batch. rows: the most rows of a decode step that verifies proposals.
        """

    @abstractmethod
    def _make_buffers(self) -> None:
        """Allocate the static tensors that live as long as the slots."""

    @abstractmethod
    def _load_weights(self, read: WeightReader, weights: DraftWeights, head: TargetHead) -> L:
        """Load the draft's own weights. They may be compared with the target's, but the result must not hold these."""

    @abstractmethod
    def _forget_buffers(self) -> None:
        """Free the buffers of single buckets. They are allocated again when they are needed."""

    @abstractmethod
    def _count_buffer_bytes(self) -> int: ...

    # --- properties ---

    @property
    def keeps_latents(self) -> bool:
        """True if a context row is key and value at once."""
        return False

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers whose outputs `extend` needs."""
        return self._shape.aux_layers

    @property
    def block(self) -> int:
        """B, the rows of a block. A block gives at most B - 1 proposals."""
        return self._shape.block

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def hidden_size(self) -> int:
        """D, the size of a hidden state of the draft, and of the features that a `Projection` computes."""
        return self._shape.hidden_size

    @property
    def _tap_width(self) -> int:
        """Numbers in a row of each auxiliary layer's output."""
        return self._shape.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def location(self) -> str:
        """The name of the draft's device, for logs and status."""
        return str(self._device)

    @property
    def capacity(self) -> int:
        """Context rows of a slot."""
        return self.rows.capacity

    @property
    def weights_state(self) -> State:
        return self._offloadable.state

    # --- rows ---

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy context rows `[start, stop)` of slot `source` into slot `target`."""
        self.rows.copy_span(source, target, start, stop)

    # --- residency ---

    def offload(self) -> int:
        """Free the weights' memory on the device and return its bytes. Context rows stay.

        On CUDA the weights stay in pinned host memory. On a CPU, loading reads the checkpoint again, which the page
        cache may still hold.
        """
        if self.weights_state != "loaded":
            return 0
        self._forget_recordings()
        return self._offloadable.offload()

    def load_back(self) -> int:
        """Load the weights again and return their bytes. If this fails, the draft stays as it was.

        Raises torch.OutOfMemoryError if the device has no room, CheckpointError if files are missing or cut short.
        """
        return self._offloadable.load_back()

    def release(self) -> None:
        """Free the offloaded weights on the host as well. Loading reads the checkpoint again."""
        self._forget_recordings()
        self._offloadable.release()

    def memory(self) -> Mapping[str, int]:
        """Return bytes by use: `weights`, `kv` and `buffers` on the device, and `host`, pinned for offloaded weights.

        What the draft shares with the target is not counted.
        """
        return {
            "weights": self._offloadable.weights_bytes,
            "host": self._offloadable.host_bytes,
            "kv": self.rows.nbytes,
            "buffers": sum(rope.cos.nbytes + rope.sin.nbytes for rope in self._ropes.values())
            + self._count_buffer_bytes(),
        }

    def close(self) -> None:
        """Free all memory. The draft cannot be used afterwards."""
        self.release()
        self.rows.close()

    def _forget_recordings(self) -> None:
        """Drop the buffers and the recorded graphs, which contain the weights' addresses: new kernels have none."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._kernels = self._kernels.copy_for_shard()
        self._forget_buffers()

    def _make_ropes(self, count: int) -> Mapping[Rotary, Rope]:
        """Return the rotary tables of the draft's layers, for this many positions."""
        return {self._shape.rotary: self._shape.rotary.tables(count, self._device)}

    @property
    def _rope(self) -> Rope:
        """The rotary table of a draft whose layers rotate alike."""
        return self._ropes[self._shape.rotary]

    def _require_weights(self) -> L:
        return self._all_weights[0]

    @property
    def _head(self) -> TargetHead:
        return self._target if isinstance(self._target, TargetHead) else self._all_weights[1][0]

    @property
    def _all_weights(self) -> HeldWeights[L]:
        held = self._offloadable.loaded
        if held is None:
            raise NotLoaded(f"the draft is {self.weights_state}")
        return held

    # --- arguments ---

    def _check_step(self, step: Step) -> None:
        if step.bucket not in self._buckets or not 0 < step.rows <= step.bucket:
            raise ValueError(f"{step.rows} rows at bucket {step.bucket}; accepted: buckets {self._buckets}, not empty")
        if len({segment.slot for segment in step.segments}) != len(step.segments):
            raise ValueError("a slot appears twice in one step")
        for segment in step.segments:
            self.rows.check_span(segment.slot, segment.start, segment.start + segment.count)

    def _check_requests(self, requests: Sequence[BlockRequest]) -> None:
        """Raise ValueError for requests that cannot be proposed for."""
        slots = self.rows.slots
        capacity = self.capacity
        block = self.block
        vocab = len(self._head.embedding)
        if not requests or len({request.slot for request in requests}) != len(requests):
            raise ValueError("nothing is asked, or a slot asks twice")
        for request in requests:
            if not 0 <= request.slot < slots:
                raise ValueError(f"slot {request.slot} is not in 0..{slots - 1}")
            if not 0 <= request.first <= request.position <= capacity:
                raise ValueError(f"context rows {request.first}..{request.position} are not within {capacity} rows")
            if not 1 <= request.count < block:
                raise ValueError(f"{request.count} proposals; accepted: 1..{block - 1}")
            if not 0 <= request.token < vocab:
                raise ValueError(f"token {request.token} is not in 0..{vocab - 1}")


def count_cache_rows(capacity: int, block: int, tile: int) -> int:
    """Return the rows of a slot's cache: its capacity and a block of proposals, rounded up to whole tiles."""
    return -(-(capacity + block) // tile) * tile


def pick_first_tokens(parts: Sequence[Tensor]) -> list[list[int]]:
    """Choose token 0 at every position, for callers that do not use the proposals."""
    return [[0] * len(part) for part in parts]


def _check_arguments(shape: DraftShape, placement: DraftPlacement) -> None:
    slots = placement.slots
    capacity = placement.capacity
    buckets = placement.buckets
    if min(slots, capacity) < 1:
        raise ValueError(f"{slots} slots of {capacity} rows; accepted: at least 1 of 1")
    if not buckets or min(buckets) < 1 or max(buckets) < shape.block:
        raise ValueError(f"buckets {tuple(buckets)} do not hold a block of {shape.block} rows")
