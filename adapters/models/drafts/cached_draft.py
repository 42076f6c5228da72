"""What all drafts share: rows of their own for those of a target, weights that can be parked, and how they are asked.

A draft follows its target: `extend` makes its rows of what the target's forward left. `propose` says what may come.
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

from adapters.models.decoder.decoder_layer import WeightReader
from adapters.models.decoder.kv_cache import KvCache
from adapters.models.decoder.pipelined_chunks import current
from adapters.models.decoder.shard import BUCKETS, NamedTensors, TargetHead
from adapters.models.drafts.draft_parts import DraftShape, DraftWeights
from adapters.models.kernels.decode_pass import DecodePass, DraftPass
from adapters.models.kernels.interface import Kernels
from adapters.models.kernels.offload import OffloadableWeights, State
from adapters.models.kernels.step import Segment, Step
from adapters.sequence_layout import RowSpec


class NotLoaded(RuntimeError):
    """A forward was asked of a draft whose weights are parked or released."""


@frozen
class BlockRequest:
    """A slot that wants `count` proposals after `token`.

    Context rows `[first, position)` are valid; token is the slot's last one, which the target has not been fed yet:
    it will be at `position`. The proposals are for `position + 1` and on.
    """

    slot: int
    first: int
    position: int
    token: int
    count: int


# Says which tokens are proposed. It is given, for each request in turn, float32 logits `[n, V]` of its next n places,
# which may be none, and gives as many tokens. A draft that says all at once asks once; one that goes on from what was
# picked asks again and again. The logits may be static buffers.
Pick: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Sequence[int]]]


# The target's own, or what makes copies of it for another device.
AnyHead: TypeAlias = TargetHead | Callable[[], TargetHead]
L = TypeVar("L")
# What a draft parks: its weights, and its own copies of the head, where the target's is on another device.
HeldWeights: TypeAlias = tuple[L, tuple[TargetHead, ...]]


class CachedDraft(ABC, Generic[L]):
    """Called on the lane's thread only. L: its loaded weights.

    kernels: an instance of its own, of its device's kind. head: what it shares with the target, on the same device and
    in the same dtype; or makes copies for its own device, which come and go with its weights. buckets: the row counts
    that `extend` accepts and `propose` pads to. A slot holds `capacity` rows and room for what is proposed behind them.
    """

    def __init__(
        self,
        shape: DraftShape,
        weights: DraftWeights,
        kernels: Kernels,
        head: AnyHead,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        slots: int = 4,
        capacity: int = 8192,
        buckets: Sequence[int] = BUCKETS,
    ) -> None:
        self._shape = shape
        self._kernels = kernels
        self._target = head
        self._device = torch.device(device)
        self._dtype = dtype
        self._buckets = tuple(sorted(buckets))
        _check_arguments(shape, (slots, capacity), self._buckets)
        rows = cache_rows(capacity, shape.block, kernels.kv_tile)
        self._rope = shape.rotary.tables(rows, self._device)
        names = [f"draft.layers.{layer}" for layer in range(shape.num_layers)]
        size = (slots, shape.num_kv_heads, rows, shape.head_dim)
        self._cache = KvCache(names, size, dtype=dtype, device=self._device, capacity=capacity)
        self._make_buffers()
        self._offloadable: OffloadableWeights[HeldWeights[L]] = OffloadableWeights(
            partial(self._read, weights), self._device
        )
        self._offloadable.load_back()
        self._try()
        facts = (weights.digest(), shape.row_facts(), str(dtype), kernels.bit_signature)
        self.identity = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    def _read(self, weights: DraftWeights) -> HeldWeights[L]:
        with current(self._device):
            head = self._target if isinstance(self._target, TargetHead) else self._target()
            self._check_head(head)
            loaded = self._load(WeightReader(weights, self._device, self._dtype), weights)
        return loaded, () if head is self._target else (head,)

    def _check_head(self, head: TargetHead) -> None:
        """Raises ValueError for one that it cannot draft for."""
        if head.embedding.shape[1] != self._shape.hidden_size or head.embedding.dtype != self._dtype:
            found = f"{head.embedding.dtype} {list(head.embedding.shape)}"
            raise ValueError(f"the target's embedding is {found}, not {self._dtype} of {self._shape.hidden_size}")

    def _try(self) -> None:
        """A first forward of each kind, over nothing: what the kernels cannot do they say now, as a ValueError."""
        bucket = self._buckets[0]
        nothing = torch.zeros(bucket, self._shape.hidden_size, dtype=self._dtype, device=self._device)
        step = Step((Segment(0, 0, 1),), bucket)
        self.extend(step, torch.zeros(1, dtype=torch.int64), dict.fromkeys(self.aux_layers, nothing))
        self.propose([BlockRequest(0, 0, 1, 0, 1)], first_tokens)

    # --- what drafts differ in ---

    @property
    @abstractmethod
    def branches(self) -> bool:
        """Does it say several positions at once, so that trees can be grown of them?"""

    @abstractmethod
    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None:
        """Write the context rows of the step's rows, at their slots and positions.

        tokens: int64 `[rows]` on the host, of these rows. aux_hidden_states: for each auxiliary layer what the target's
        forward of this very step left, `[bucket, D]`. Rows past a position that is gone back to need not be taken back.
        """

    @abstractmethod
    def take(self, step: Step, tokens: Tensor, features: Tensor) -> None:
        """`extend` with what its `Projection` has made of the hidden states elsewhere: `[rows, D]`, on any device."""

    @abstractmethod
    def propose(self, requests: Sequence[BlockRequest], pick: Pick) -> None:
        """Up to `count` proposals for each request; `pick` hears what the draft says of them, and has them."""

    def build_draft_pass(self, count: int, target: DecodePass) -> DraftPass | None:  # noqa: ARG002 - a default
        """Return what proposes `count` tokens within a decode step of the compiled library; None if nothing does."""
        return None

    @abstractmethod
    def rehearsals(self, slots: int, rows: int) -> Iterator[list[BlockRequest]]:
        """Requests of up to so many slots: once all of them have been proposed to, every shape has run that is likely.

        rows: of a decode step that verifies what is proposed, at most.
        """

    @abstractmethod
    def _make_buffers(self) -> None:
        """Static tensors that live as long as the slots."""

    @abstractmethod
    def _load(self, read: WeightReader, weights: DraftWeights) -> L: ...

    @abstractmethod
    def _forget_buffers(self) -> None:
        """Those of single buckets; they are made again when they are needed."""

    @abstractmethod
    def _buffers_bytes(self) -> int: ...

    # --- what it is ---

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers that `extend` needs the outputs of."""
        return self._shape.aux_layers

    @property
    def block(self) -> int:
        """B; at most B - 1 proposals."""
        return self._shape.block

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def hidden_size(self) -> int:
        """D, of its target, too."""
        return self._shape.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def place(self) -> str:
        """Where it is, in a word."""
        return str(self._device)

    @property
    def capacity(self) -> int:
        """Context rows of a slot."""
        return self._cache.capacity

    @property
    def row_spec(self) -> RowSpec:
        return self._cache.spec

    @property
    def addressed(self) -> bool:
        return True

    @property
    def state(self) -> State:
        return self._offloadable.state

    # --- rows ---

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy context rows `[start, stop)` of slot `source` into slot `target`."""
        self._cache.copy(source, target, start, stop)

    def rows(self, slot: int, start: int, stop: int) -> Tensor:
        """Context rows `[start, stop)` where they are: a view `[layers, 2, KV, stop - start, hd]`."""
        return self._cache.rows(slot, start, stop)

    def export_rows(self, slot: int, start: int, stop: int) -> NamedTensors:
        """Context rows `[start, stop)` as `draft.layers.N.k` and `.v`, each `[KV, stop - start, hd]`, on the host."""
        return self._cache.export(slot, start, stop)

    def import_rows(self, slot: int, start: int, rows: NamedTensors) -> None:
        """Put what `export_rows` gave back at `start`; a name, shape or dtype that is not ours is a ValueError."""
        self._cache.import_(slot, start, rows)

    # --- residency ---

    def offload(self) -> int:
        """Give the weights' memory on the device back; context rows stay. Returns the bytes given back.

        On CUDA they are kept in pinned host memory; on CPU the checkpoint is read again, from the page cache at best.
        """
        if self.state != "loaded":
            return 0
        self._forget()
        return self._offloadable.offload()

    def load_back(self) -> int:
        """Bring the weights back; returns the bytes. Whatever fails leaves the draft as it was.

        Raises torch.OutOfMemoryError where there is no room, CheckpointError if the files have gone or are cut short.
        """
        return self._offloadable.load_back()

    def release(self) -> None:
        """Give back what parking keeps on the host as well; unparking reads the checkpoint again."""
        self._forget()
        self._offloadable.release()

    def memory(self) -> Mapping[str, int]:
        """Bytes: `weights`, `kv` and `buffers` on the device; `host` pinned by parking. Nothing shared is counted."""
        return {
            "weights": self._offloadable.weights_bytes,
            "host": self._offloadable.host_bytes,
            "kv": self._cache.nbytes,
            "buffers": self._rope.cos.nbytes + self._rope.sin.nbytes + self._buffers_bytes(),
        }

    def close(self) -> None:
        """Give all memory back; the draft is of no use afterwards."""
        self.release()
        self._cache.close()

    def _forget(self) -> None:
        """Buffers go, and recorded graphs with the weights' addresses in them: fresh kernels have recorded nothing."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._kernels = self._kernels.copy_for_shard()
        self._forget_buffers()

    def _loaded(self) -> L:
        return self._held[0]

    @property
    def _head(self) -> TargetHead:
        return self._target if isinstance(self._target, TargetHead) else self._held[1][0]

    @property
    def _held(self) -> HeldWeights[L]:
        held = self._offloadable.loaded
        if held is None:
            raise NotLoaded(f"the draft is {self.state}")
        return held

    # --- arguments ---

    def _check_step(self, step: Step) -> None:
        if step.bucket not in self._buckets or not 0 < step.rows <= step.bucket:
            raise ValueError(f"{step.rows} rows at bucket {step.bucket}; accepted: buckets {self._buckets}, not empty")
        if len({segment.slot for segment in step.segments}) != len(step.segments):
            raise ValueError("a slot appears twice in one step")
        for segment in step.segments:
            self._cache.check_span(segment.slot, segment.start, segment.start + segment.count)

    def _check_requests(self, requests: Sequence[BlockRequest]) -> None:
        """Raises ValueError for what cannot be proposed to."""
        slots = self._cache.slots
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


def cache_rows(capacity: int, block: int, tile: int) -> int:
    """A slot's rows, and room for the block behind them, in whole tiles."""
    return -(-(capacity + block) // tile) * tile


def first_tokens(parts: Sequence[Tensor]) -> list[list[int]]:
    """Picks without a look, where it does not matter what is proposed."""
    return [[0] * len(part) for part in parts]


def _check_arguments(shape: DraftShape, caches: tuple[int, int], buckets: Sequence[int]) -> None:
    if min(caches) < 1:
        raise ValueError(f"{caches[0]} slots of {caches[1]} rows; accepted: at least 1 of 1")
    if not buckets or buckets[0] < 1 or buckets[-1] < shape.block:
        raise ValueError(f"buckets {tuple(buckets)} do not hold a block of {shape.block} rows")
