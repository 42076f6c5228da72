"""The prompt scorer: a small model whose attention shows which tokens of a prompt its end refers to.

Theory of operation
-------------------

The score of a token is the attention that the last TAIL tokens of the prompt pay to it: a softmax over the keys that
each of these queries sees, and of that the largest value over all heads and layers. `scores` averages it over the
queries and over neighbouring tokens. Queries and keys are taken before they are rotated, so that distance in the prompt
does not matter.

The whole prompt goes through one layer, portion by portion, before the next layer begins. So only the hidden states of
the prompt and the keys and values of one layer are in memory. A layer is scored when all of its keys are known.

Full attention would take most of the time of a long prompt, so most rows have a window: they attend to the first SINK
rows and to the latest rows (WINDOW before their band, and the band itself up to the row). The last ASKING rows attend
to all rows. Bands begin at multiples of BAND, so the chunk size does not change which rows a row attends to.

The scorer takes turns with other work of its device: `Scoring.advance` does the work of one turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.checkpoint.weight_source import WeightSource
from adapters.models.decoder.cache.recurrent_cache import RecurrentCache
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.layers.attention_heads import finish_attention
from adapters.models.decoder.layers.decoder_layer import DecoderLayer, finish_layer, load_layer, project_inputs
from adapters.models.decoder.layers.recurrent_layer import DeltaLayer, load_delta_layer
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Kernels
from adapters.models.kernels.offload import OffloadableWeights
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import StateBatch

TAIL = 8  # last tokens of the prompt, whose queries score the others
TURN = 1024  # the most rows, through all layers, in one turn: a target's chunk on a GPU
POOL = 13  # tokens that a score is averaged over, centred on its own token
SINK = 256  # first rows, which all rows attend to: models give unneeded attention to them
WINDOW = 4096  # rows before a band that the rows of the band attend to
BAND = 4096  # rows of a band
ASKING = 512  # last rows, which attend to all rows


@frozen
class Portion:
    """Rows that go through a layer together.

    low: the first row of their window. They attend to rows from `low` on, and to the first SINK rows. 0: to all rows.
    """

    start: int
    stop: int
    low: int = 0


def split_portions(count: int, chunk: int) -> Iterator[Portion]:
    """Yield the portions of a prompt of `count` tokens, in order. chunk: the most rows of a portion."""
    asking = count - ASKING if count > WINDOW + BAND else 0
    for first, last in pairwise(sorted({*range(0, count, BAND), asking, count})):
        low = first // BAND * BAND - WINDOW
        for start in range(first, last, chunk):
            yield Portion(start, min(last, start + chunk), low if low > SINK and start < asking else 0)


@frozen(eq=False)
class ScorerWeights:
    """The weights of a scorer. It needs neither the last norm nor the head, because it generates nothing."""

    embedding: Tensor
    layers: tuple[DecoderLayer | DeltaLayer, ...]


@define(eq=False)
class Scorer:
    """A model of any family with decoder layers. Only its embedding and its layers are loaded.

    buckets: the row counts that its forwards run with. limit: the most tokens of a prompt.
    """

    config: DenseConfig
    source: WeightSource
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    buckets: tuple[int, ...]
    limit: int
    weights: OffloadableWeights[ScorerWeights] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.weights = OffloadableWeights(self._load, self.device)

    @property
    def chunk(self) -> int:
        return self.buckets[-1]

    def _load(self) -> ScorerWeights:
        config = self.config
        read = WeightReader(self.source, self.device, self.dtype)
        layers = tuple(
            (load_delta_layer if config.recurrent(layer) else load_layer)(
                read, self.kernels, config.shape_of(layer), f"model.layers.{layer}."
            )
            for layer in range(config.num_layers)
        )
        return ScorerWeights(read("model.embed_tokens.weight"), layers)

    def begin(self, tokens: tuple[int, ...]) -> Scoring:
        """Begin to score a prompt. The weights must be loaded. Raises torch.OutOfMemoryError."""
        return Scoring(self, tokens)


@define(eq=False)
class Scoring:
    """A prompt that is being scored: one portion goes through one layer at a time."""

    scorer: Scorer
    tokens: tuple[int, ...]
    layer: int = field(init=False, default=0)
    done: int = field(init=False, default=0)  # portions that are through that layer
    _portions: tuple[Portion, ...] = field(init=False)
    _hidden: Tensor = field(init=False)  # [n, D], the residual stream: behind the layer for done rows, else before it
    _kv: Tensor = field(init=False)  # [2, 1, KV, n, hd], of the layer
    _near: Tensor | None = field(init=False, default=None)  # `_kv` of the rows that a band attends to, side by side
    _keys: Tensor = field(init=False)  # [KV, n, hd], of the layer, not rotated
    _tail: Tensor = field(init=False)  # [KV, G, TAIL, hd], queries of the layer, not rotated
    _most: Tensor = field(init=False)  # [TAIL, n], the largest weights of all layers so far
    _rope: Any = field(init=False)
    _batches: dict[tuple[int, int], StateBatch] = field(init=False, factory=dict)  # by first row and rows
    _states: RecurrentCache | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        scorer = self.scorer
        config = self.scorer.config
        count = len(self.tokens)
        if not TAIL <= count <= scorer.limit:
            raise ValueError(f"a prompt of {count} tokens; accepted: {TAIL} to {scorer.limit}")
        self._portions = tuple(split_portions(count, scorer.chunk))
        tile = scorer.kernels.kv_tile
        capacity = -(-count // tile) * tile
        make = partial(torch.zeros, device=scorer.device, dtype=scorer.dtype)
        heads = config.num_kv_heads, config.num_heads // config.num_kv_heads
        self._rope = config.rotary.tables(capacity, scorer.device)
        weights = scorer.weights.loaded
        assert weights is not None, "the scorer is not loaded"
        ids = torch.tensor(self.tokens, device=scorer.device)
        self._hidden = torch.index_select(weights.embedding, 0, ids)
        self._kv = make(2, 1, heads[0], capacity, config.head_dim)
        if any(portion.low for portion in self._portions):
            self._near = make(2, 1, heads[0], SINK + WINDOW + BAND, config.head_dim)
        self._keys = make(heads[0], count, config.head_dim)
        self._tail = torch.zeros(*heads, TAIL, config.head_dim, device=scorer.device)
        self._most = torch.zeros(TAIL, count, device=scorer.device)
        if any(config.recurrent(layer) for layer in range(config.num_layers)):
            delta = scorer.kernels.delta
            self._states = RecurrentCache(
                ["layer"], config.delta, delta, slots=1, checkpoint_count=0, device=scorer.device, dtype=scorer.dtype
            )

    @property
    def complete(self) -> bool:
        return self.layer == len(self._layers)

    @property
    def _layers(self) -> tuple[DecoderLayer | DeltaLayer, ...]:
        loaded = self.scorer.weights.loaded
        assert loaded is not None, "the scorer is not loaded"
        return loaded.layers

    def advance(self) -> None:
        """Take one turn: as much work as a chunk through all layers, but at most that of TURN rows."""
        rows = min(TURN, self.scorer.chunk) * len(self._layers)
        chunk = self.scorer.chunk
        with torch.inference_mode():
            for _ in range(-(-rows // chunk)):
                if not self.complete:
                    self._run_portion()
        if self.scorer.device.type == "cuda":
            torch.cuda.current_stream(self.scorer.device).synchronize()

    def _run_portion(self) -> None:
        layer = self._layers[self.layer]
        portion = self._portions[self.done]
        self._forward(layer, portion, last=self.layer == len(self._layers) - 1)
        self.done += 1
        if self.done == len(self._portions):
            if isinstance(layer, DecoderLayer):
                self._score()
            self.layer = self.layer + 1
            self.done = 0

    def _forward(self, layer: DecoderLayer | DeltaLayer, portion: Portion, *, last: bool) -> None:
        """Run one layer over the rows of a portion, padded to a bucket, and update their hidden states in place.

        last: it is the last layer, which stops after its keys and queries.
        """
        rows = portion.stop - portion.start
        bucket = next(bucket for bucket in self.scorer.buckets if bucket >= rows)
        step = Step((Segment(0, portion.start, rows),), bucket, rows_only=True)
        states = None if isinstance(layer, DecoderLayer) else self._states
        batch = self._batch(step, states)
        residual = self._hidden[portion.start : portion.stop]
        if bucket > rows:
            residual = torch.nn.functional.pad(residual, (0, 0, 0, bucket - rows))

        def body() -> None:
            delta = self._run(layer, residual, batch, portion, stops=last)
            if delta is not None:
                residual.add_(delta)

        # On CUDA no graph is recorded, because a graph would belong to one layer's weights.
        with nullcontext() if states is None else states.settling(step):
            self._launch(batch, body)
        if bucket > rows:
            self._hidden[portion.start : portion.stop] = residual[:rows]

    def _launch(self, batch: StateBatch, body: Any) -> None:
        if self.scorer.device.type == "cuda":
            body()
        else:
            self.scorer.kernels.launch("score", batch, body)

    def _batch(self, step: Step, states: RecurrentCache | None = None) -> StateBatch:
        """Return the batch of a step for the kernels. It is kept for all layers if the model has no recurrent layer."""
        [segment] = step.segments
        key = (segment.start, segment.count)
        batch = self._batches.get(key)
        if batch is None or self._states is not None:
            batch = self._batches[key] = batch or StateBatch(step.bucket, self.scorer.device)
            batch.before = (0,) if states is None else states.start(step)
            batch.settles = True
            batch.load(step, None)
            self.scorer.kernels.prepare_step(batch)
        return batch

    def _run(
        self, layer: DecoderLayer | DeltaLayer, residual: Tensor, batch: StateBatch, portion: Portion, *, stops: bool
    ) -> Tensor | None:
        """Run a layer and return the change of the residual stream.

        stops: it is the last layer. If it attends, only its keys and queries are computed, and None is returned.
        """
        kernels = self.scorer.kernels
        own = project_inputs(kernels, layer.frame, residual, None)
        if isinstance(layer, DeltaLayer):
            assert kernels.delta is not None
            assert self._states is not None
            mixed = layer.mix(kernels.delta, own, self._states.layers[0], batch)
        else:
            self._take(own[: portion.stop - portion.start, : layer.width], layer.prep, portion.start)
            if stops:
                return None
            k_cache, v_cache = self._kv
            q = kernels.rotate_store(own[:, : layer.width], layer.prep, self._rope, batch, k_cache, v_cache)
            mixed = finish_attention(kernels, layer, self._attend(q, batch, portion), own)
        return finish_layer(kernels, layer.frame, residual, mixed, batch)

    def _attend(self, q: Tensor, batch: StateBatch, portion: Portion) -> Tensor:
        """Return the attention of a portion's rows.

        The rows that a band attends to have a gap between the first SINK and the window. They are copied into a cache
        without that gap, so that ordinary kernels can read it. Keys are rotated by their positions already, so moving
        them changes nothing.
        """
        kernels = self.scorer.kernels
        (k_cache, v_cache) = self._kv
        if not portion.low:
            return kernels.attend(q, k_cache, v_cache, batch)
        assert self._near is not None
        band = portion.start // BAND * BAND
        moved = portion.low - SINK
        first = portion.low if portion.start == band else portion.start
        self._near[..., :SINK, :] = self._kv[..., :SINK, :]
        self._near[..., first - moved : portion.stop - moved, :] = self._kv[..., first : portion.stop, :]
        [segment] = batch.segments
        step = Step((Segment(0, portion.start - moved, segment.count),), batch.bucket, rows_only=True)
        k_near, v_near = self._near
        return kernels.attend(q, k_near, v_near, self._batch(step))

    def _take(self, qkv: Tensor, prep: HeadPrep, start: int) -> None:
        """Take the portion's keys, and its queries if it has some of the prompt's last TAIL tokens."""
        config = self.scorer.config
        stop = start + len(qkv)
        count = len(self.tokens)
        queries = config.num_heads
        kv = config.num_kv_heads
        heads = qkv.view(len(qkv), -1, config.head_dim)
        bias = None if prep.bias is None else prep.bias.view(-1, config.head_dim)

        def norm_heads(first: int, last: int, row: int, weight: Tensor | None) -> Tensor:
            own = heads[row:, first:last].float()
            return normalize_heads(own if bias is None else own + bias[first:last].float(), weight, prep.eps)

        self._keys[:, start:stop] = norm_heads(queries, queries + kv, 0, prep.k_norm).transpose(0, 1)
        first = max(start, count - TAIL)
        if first < stop:
            column = first - (count - TAIL)
            asking = norm_heads(0, queries, first - start, prep.q_norm).view(stop - first, kv, -1, config.head_dim)
            self._tail[:, :, column : column + stop - first] = asking.permute(1, 2, 0, 3)

    def _score(self) -> None:
        """Score the layer, one key head after the other, so that the weights of only one are in memory at once."""
        count = len(self.tokens)
        scale = self.scorer.config.head_dim**-0.5
        rows = torch.arange(count - TAIL, count, device=self.scorer.device).unsqueeze(1)
        hidden = torch.arange(count, device=self.scorer.device) > rows
        for keys, group in zip(self._keys, self._tail, strict=True):
            scores = ((group.flatten(0, 1) * scale) @ keys.float().T).view(*group.shape[:2], count)
            weights = torch.softmax(scores.masked_fill_(hidden, float("-inf")), -1)
            torch.maximum(self._most, weights.amax(0), out=self._most)

    def scores(self) -> list[float]:
        """Return the score of every token: the mean over the last TAIL queries, averaged over its neighbours."""
        mean = self._most.mean(0)
        half = POOL // 2
        pooled = torch.nn.functional.avg_pool1d(
            mean.view(1, 1, -1), POOL, stride=1, padding=half, count_include_pad=False
        )
        found: list[float] = pooled.view(-1).tolist()
        return found

    def drop(self) -> None:
        """Do nothing: a local scoring keeps its state in itself. `RemoteScoring` has to tell its process."""

    @property
    def nbytes(self) -> int:
        near = 0 if self._near is None else self._near.nbytes
        return near + sum(buffer.nbytes for buffer in (self._hidden, self._kv, self._keys, self._tail, self._most))


def normalize_heads(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return heads
    return torch.rms_norm(heads, heads.shape[-1:], None, eps) * weight.float()
