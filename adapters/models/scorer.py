"""How much of a prompt's end looks at each of its tokens: the attention of a small model, layer after layer.

The whole prompt goes through one layer, piece by piece, before the next one is begun: only its hidden states, and one
layer's keys and values, are ever there at once. A layer that attends is scored with its last queries as soon as all of
its keys are known: softmax over the keys that each of them sees, of which the largest over heads and layers counts.
Queries and keys are taken before they are rotated, so that what is far away weighs as much as what is near.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.checkpoint.weights import WeightSource
from adapters.models.decoder import DecoderLayer, WeightReader, finished, gated, load_layer, projected
from adapters.models.dense_config import DenseConfig
from adapters.models.kernels.batch import StateBatch
from adapters.models.kernels.interface import HeadPrep, Kernels
from adapters.models.parking import ParkedWeights
from adapters.models.recurrent import DeltaLayer, load_delta_layer
from adapters.models.recurrent_cache import RecurrentCache
from adapters.models.shard import Segment, Step

TAIL = 8  # last tokens, whose queries score
POOL = 13  # tokens that a score is averaged over, it in the middle


@frozen(eq=False)
class ScorerWeights:
    """Neither the last norm nor a head: nothing is generated."""

    embedding: Tensor
    layers: tuple[DecoderLayer | DeltaLayer, ...]


@define(eq=False)
class Scorer:
    """A model of any family that is made of decoder layers, of which only the layers are read.

    buckets: the row counts that its forwards run with. limit: tokens of a prompt at most.
    """

    config: DenseConfig
    source: WeightSource
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    buckets: tuple[int, ...]
    limit: int
    weights: ParkedWeights[ScorerWeights] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.weights = ParkedWeights(self._load, self.device)

    @property
    def chunk(self) -> int:
        return self.buckets[-1]

    def _load(self) -> ScorerWeights:
        config, read = self.config, WeightReader(self.source, self.device, self.dtype)
        layers = tuple(
            (load_delta_layer if config.recurrent(layer) else load_layer)(
                read, self.kernels, config.shape_of(layer), f"model.layers.{layer}."
            )
            for layer in range(config.num_layers)
        )
        return ScorerWeights(read("model.embed_tokens.weight"), layers)

    def begin(self, tokens: tuple[int, ...]) -> Scoring:
        """Raises torch.OutOfMemoryError. The weights must be loaded."""
        return Scoring(self, tokens)


@define(eq=False)
class Scoring:
    """One prompt on its way through the layers, a piece of one layer at a time."""

    scorer: Scorer
    tokens: tuple[int, ...]
    layer: int = field(init=False, default=0)
    done: int = field(init=False, default=0)  # rows of that layer
    _hidden: Tensor = field(init=False)  # [n, D], the residual stream before the layer, and behind it for rows done
    _kv: Tensor = field(init=False)  # [2, 1, KV, n, hd], of the layer
    _keys: Tensor = field(init=False)  # [KV, n, hd], of the layer, not rotated
    _tail: Tensor = field(init=False)  # [KV, G, TAIL, hd], queries of the layer, not rotated
    _most: Tensor = field(init=False)  # [TAIL, n], the largest of all layers so far
    _rope: Any = field(init=False)
    _batches: dict[int, tuple[StateBatch, Tensor]] = field(init=False, factory=dict)
    _states: RecurrentCache | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        scorer, config, count = self.scorer, self.scorer.config, len(self.tokens)
        if not TAIL <= count <= scorer.limit:
            raise ValueError(f"a prompt of {count} tokens; accepted: {TAIL} to {scorer.limit}")
        tile = scorer.kernels.kv_tile
        capacity = -(-count // tile) * tile
        how: dict[str, Any] = {"device": scorer.device, "dtype": scorer.dtype}
        heads = config.num_kv_heads, config.num_heads // config.num_kv_heads
        self._rope = config.rotary.tables(capacity, scorer.device)
        weights = scorer.weights.loaded
        assert weights is not None, "the drafter is not loaded"
        ids = torch.tensor(self.tokens, device=scorer.device)
        self._hidden = torch.index_select(weights.embedding, 0, ids)
        self._kv = torch.zeros(2, 1, heads[0], capacity, config.head_dim, **how)
        self._keys = torch.zeros(heads[0], count, config.head_dim, **how)
        self._tail = torch.zeros(*heads, TAIL, config.head_dim, device=scorer.device)
        self._most = torch.zeros(TAIL, count, device=scorer.device)
        if any(config.recurrent(layer) for layer in range(config.num_layers)):
            delta = scorer.kernels.delta
            self._states = RecurrentCache(["layer"], config.delta, delta, slots=1, places=0, **how)

    @property
    def complete(self) -> bool:
        return self.layer == len(self._layers)

    @property
    def _layers(self) -> tuple[DecoderLayer | DeltaLayer, ...]:
        loaded = self.scorer.weights.loaded
        assert loaded is not None, "the drafter is not loaded"
        return loaded.layers

    def advance(self) -> None:
        """One more piece of the layer, of a chunk's rows at most."""
        layer, start = self._layers[self.layer], self.done
        stop = min(len(self.tokens), start + self.scorer.chunk)
        last = self.layer == len(self._layers) - 1
        with torch.inference_mode():
            self._forward(layer, start, stop, last=last)
            self.done = stop
            if stop == len(self.tokens):
                if isinstance(layer, DecoderLayer):
                    self._score()
                self.layer, self.done = self.layer + 1, 0
        if self.scorer.device.type == "cuda":
            torch.cuda.current_stream(self.scorer.device).synchronize()

    def _forward(self, layer: DecoderLayer | DeltaLayer, start: int, stop: int, *, last: bool) -> None:
        scorer, rows = self.scorer, stop - start
        bucket = next(bucket for bucket in scorer.buckets if bucket >= rows)
        step = Step((Segment(0, start, rows),), bucket, rows_only=True)
        batch, residual = self._batch(bucket)
        residual.zero_()
        residual[:rows] = self._hidden[start:stop]
        states = None if isinstance(layer, DecoderLayer) else self._states
        batch.before, batch.settles = (0,) if states is None else states.start(step), True
        batch.load(step, None)
        scorer.kernels.prepare(batch)

        def body() -> None:
            delta = self._run(layer, residual, batch, rows, stops=last)
            if delta is not None:
                residual.add_(delta)

        # A recorded graph would be of one layer's weights, so on CUDA none is.
        with nullcontext() if states is None else states.settling(step):
            self._launch(batch, body)
        self._hidden[start:stop] = residual[:rows]

    def _launch(self, batch: StateBatch, body: Any) -> None:
        if self.scorer.device.type == "cuda":
            body()
        else:
            self.scorer.kernels.launch("score", batch, body)

    def _run(
        self, layer: DecoderLayer | DeltaLayer, residual: Tensor, batch: StateBatch, rows: int, *, stops: bool
    ) -> Tensor | None:
        """What is to be added to the residual stream; of the last layer nothing is wanted but its keys and queries."""
        kernels = self.scorer.kernels
        own = projected(kernels, layer.frame, residual, None)
        if isinstance(layer, DeltaLayer):
            assert kernels.delta is not None
            assert self._states is not None
            mixed = layer.mix(kernels.delta, own, self._states.layers[0], batch)
        else:
            start = batch.segments[0].start
            self._take(own[:rows, : layer.width], layer.prep, start)
            if stops:
                return None
            k_cache, v_cache = self._kv
            q = kernels.rotate_store(own[:, : layer.width], layer.prep, self._rope, batch, k_cache, v_cache)
            mixed = gated(kernels, layer, kernels.attend(q, k_cache, v_cache, batch), own)
        return finished(kernels, layer.frame, residual, mixed, batch)

    def _take(self, qkv: Tensor, prep: HeadPrep, start: int) -> None:
        """The piece's keys, and its queries where the prompt's last tokens are in it."""
        config, stop, count = self.scorer.config, start + len(qkv), len(self.tokens)
        heads = qkv.reshape(len(qkv), -1, config.head_dim).float()
        if prep.bias is not None:
            heads = heads + prep.bias.float().view(-1, config.head_dim)
        kv = config.num_kv_heads
        keys = normed(heads[:, config.num_heads : config.num_heads + kv], prep.k_norm, prep.eps)
        self._keys[:, start:stop] = keys.transpose(0, 1)
        first = max(start, count - TAIL)
        if first < stop:
            queries = normed(heads[first - start :, : config.num_heads], prep.q_norm, prep.eps)
            place = first - (count - TAIL)
            grouped = queries.view(stop - first, kv, -1, config.head_dim).permute(1, 2, 0, 3)
            self._tail[:, :, place : place + stop - first] = grouped

    def _score(self) -> None:
        """Head by head, so that no more than one head's weights are there at once."""
        count, scale = len(self.tokens), self.scorer.config.head_dim**-0.5
        rows = torch.arange(count - TAIL, count, device=self.scorer.device).unsqueeze(1)
        hidden = torch.arange(count, device=self.scorer.device) > rows
        for keys, group in zip(self._keys, self._tail, strict=True):
            wide = keys.float()
            for queries in group:
                scores = (queries * scale) @ wide.T
                weights = torch.softmax(scores.masked_fill_(hidden, float("-inf")), -1)
                torch.maximum(self._most, weights, out=self._most)

    def scores(self) -> list[float]:
        """Of every token: the mean over the last ones' queries, averaged over its neighbours."""
        mean = self._most.mean(0)
        half = POOL // 2
        pooled = torch.nn.functional.avg_pool1d(
            mean.view(1, 1, -1), POOL, stride=1, padding=half, count_include_pad=False
        )
        found: list[float] = pooled.view(-1).tolist()
        return found

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self._hidden, self._kv, self._keys, self._tail, self._most))

    def _batch(self, bucket: int) -> tuple[StateBatch, Tensor]:
        if bucket not in self._batches:
            shape = (bucket, self.scorer.config.hidden_size)
            residual = torch.zeros(shape, device=self.scorer.device, dtype=self.scorer.dtype)
            self._batches[bucket] = StateBatch(bucket, self.scorer.device), residual
        return self._batches[bucket]


def normed(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return heads
    return torch.rms_norm(heads, heads.shape[-1:], None, eps) * weight.float()
