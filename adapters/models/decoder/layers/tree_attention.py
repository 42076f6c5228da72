"""Trees of proposals in one forward: every node gets the bits that it would get at the end of its chain.

All products run once, at one bucket, for all nodes. Attention needs more, because several nodes of a tree have the same
position in the cache:

1. Keys and values of all nodes are kept apart from the cache.
2. A tree is cut into chains (pieces), in depth-first order. One piece after the other is written to its positions in
   the cache, and then its rows attend.
3. So a row sees its ancestors only. Earlier pieces on other branches have been overwritten at the positions before it.

The pieces of several slots attend together: the first piece of each slot, then the second of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise, zip_longest

import torch
from attrs import astuple, define, field, frozen
from torch import Tensor

from adapters.models.decoder.cache.kv_cache import KvCache
from adapters.models.decoder.layers.attention_heads import scale_queries
from adapters.models.decoder.layers.decoder_layer import DecoderLayer
from adapters.models.decoder.shard import Kept
from adapters.models.kernels.formats.row_format import as_bytes
from adapters.models.kernels.interfaces.attention_rule import PLAIN, AttentionRule
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Kernels, Rope
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch


@frozen
class TreePiece:
    """A segment and where its rows start in the step."""

    segment: Segment
    row: int


@frozen(eq=False)
class Wave:
    """Pieces of different slots that attend together. rows: their rows in the step, int64 `[bucket]`, padded with 0."""

    pieces: tuple[TreePiece, ...]
    rows: Tensor
    count: int
    batch: Batch


@define(eq=False)
class TreeAttention:
    """The static tensors of one bucket's trees in the layers of one cache, and the step that was loaded last.

    tables: of these layers, which rotate alike. cache: their keys and values. Waves have the step's bucket, which is
    proven.
    """

    kernels: Kernels
    bucket: int
    tables: Rope
    cache: KvCache
    flat: Batch = field(init=False)
    rope: Rope = field(init=False)
    aside: list[tuple[Tensor, Tensor]] = field(init=False)
    waves: list[Wave] = field(init=False, factory=list)
    _batches: list[Batch] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        k, _ = self.cache.layers[0]
        self.flat = Batch(self.bucket, k.device)
        cos, sin, scale = (
            None if table is None else table.new_zeros(self.bucket, *table.shape[1:])
            for table in (self.tables.cos, self.tables.sin, self.tables.query_scale)
        )
        assert cos is not None
        assert sin is not None
        self.rope = Rope(cos, sin, scale)
        self.aside = self.cache.make_rows(self.bucket)

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + (0 if v is k else v.nbytes) for k, v in self.aside)

    def load(self, step: Step) -> None:
        self.flat.load(Step((Segment(0, 0, step.rows),), self.bucket), None)
        self.kernels.prepare_step(self.flat)
        spans = [torch.arange(segment.start, segment.start + segment.count) for segment in step.segments]
        positions = torch.cat(spans).to(self.tables.cos.device)
        for table, rows in zip(*(astuple(rope, recurse=False) for rope in (self.tables, self.rope)), strict=True):
            if table is not None:
                torch.index_select(table, 0, positions, out=rows[: step.rows])
        self.waves = [self._wave(number, pieces) for number, pieces in enumerate(waves_of(step))]

    def _wave(self, number: int, pieces: tuple[TreePiece, ...]) -> Wave:
        count = sum(piece.segment.count for piece in pieces)
        if number == len(self._batches):
            self._batches.append(Batch(self.bucket, self.flat.device))
        batch = self._batches[number]
        batch.load(Step(tuple(piece.segment for piece in pieces), self.bucket), None)
        self.kernels.prepare_step(batch)
        rows = torch.zeros(self.bucket, dtype=torch.int64)
        torch.cat([torch.arange(piece.row, piece.row + piece.segment.count) for piece in pieces], out=rows[:count])
        return Wave(pieces, rows.to(self.flat.device), count, batch)

    def attend(
        self, number: int, heads: Tensor, prep: HeadPrep, rule: AttentionRule = PLAIN, *, reads: bool = False
    ) -> Tensor:
        """Run `rotate_store` and `attend` of layer `number`, as if every path were a chain of its own.

        reads: the heads are queries of a later layer, which reads the rows of this one.
        """
        out: Tensor | None = None
        (k_cache, v_cache) = self.cache.layers[number]
        (k, v) = self.aside[number]
        if reads:
            q = self.kernels.rotate_queries(heads, prep, self.rope, self.flat, k)
        else:
            q = self.kernels.rotate_store(heads, prep, self.rope, self.flat, k, v)
        q = scale_queries(q, self.rope, self.flat)
        pages = self.cache.find_table(number)
        for wave in self.waves:
            for piece in wave.pieces:
                rows = slice(piece.row, piece.row + piece.segment.count)
                self.cache.put(number, piece.segment.slot, piece.segment.start, k[0, :, rows], v[0, :, rows])
            batch = wave.batch.with_pages(pages)
            found = self.kernels.attend(q.index_select(0, wave.rows), k_cache, v_cache, batch, rule)
            out = torch.zeros_like(found) if out is None else out
            out.index_copy_(0, wave.rows[: wave.count], found[: wave.count])
        assert out is not None
        return out

    def settle(self, step: Step, kept: Sequence[Kept]) -> None:
        """Put the accepted path of every tree at its positions."""
        first = 0
        for part, keep in zip(step.parts, kept, strict=True):
            if keep:
                path = check_path(part, tuple(range(keep)) if isinstance(keep, int) else keep)
                rows = torch.tensor([first + row for row in path]).to(self.flat.device)
                for number, (k, v) in enumerate(self.aside):
                    self.cache.put(number, part[0].slot, part[0].start, take_rows(k, rows), take_rows(v, rows))
            first += sum(segment.count for segment in part)


def take_rows(cache: Tensor, rows: Tensor) -> Tensor:
    """Return these rows of the first slot, `[KV, rows, width]`."""
    return as_bytes(cache)[0, :, rows].view(cache.dtype)


@define(eq=False)
class TreeGroups:
    """The trees of one bucket in all layers of a shard.

    Layers that keep all rows and those that keep a window have caches and rotary tables of their own, so each kind is a
    group. layers: the group of each layer that keeps rows, and the layer's index there.
    """

    groups: tuple[TreeAttention, ...]
    layers: Mapping[int, tuple[TreeAttention, int]]

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    def load(self, step: Step) -> None:
        for group in self.groups:
            group.load(step)

    def attend(self, layer: DecoderLayer, owner: int, heads: Tensor) -> Tensor:
        """Attend in one layer, as `TreeAttention` does. owner: the layer that keeps the rows."""
        group, index = self.layers[owner]
        return group.attend(index, heads, layer.prep, layer.rule, reads=layer.source is not None)

    def settle(self, step: Step, kept: Sequence[Kept]) -> None:
        """Put the accepted path of every tree at its positions."""
        for group in self.groups:
            group.settle(step, kept)


def waves_of(step: Step) -> list[tuple[TreePiece, ...]]:
    """The first piece of every slot, the second of every slot that has one, and so on."""
    firsts = accumulate((segment.count for segment in step.segments), initial=0)
    pieces = iter(TreePiece(segment, row) for segment, row in zip(step.segments, firsts, strict=False))
    by_slot = [[next(pieces) for _ in part] for part in step.parts]
    return [tuple(piece for piece in wave if piece is not None) for wave in zip_longest(*by_slot)]


def check_tree(part: tuple[Segment, ...]) -> None:
    """Raise ValueError for segments of one slot that are not the pieces of a tree in depth-first order."""
    root = part[0].start
    for before, piece in pairwise(part):
        if not root < piece.start <= before.start + before.count:
            span = f"rows {piece.start}..{piece.start + piece.count}"
            raise ValueError(f"slot {piece.slot} appears twice in one step, and {span} do not branch off those before")


def check_path(part: tuple[Segment, ...], path: tuple[int, ...]) -> tuple[int, ...]:
    """Return the path. Raises ValueError if it does not lead down from the root."""
    parents = parents_of(part)
    inside = all(0 <= row < len(parents) for row in path)
    if path[0] or not inside or [parents[row] for row in path[1:]] != list(path[:-1]):
        raise ValueError(f"rows {path} of slot {part[0].slot} are not a path from the root of its tree")
    return path


def parents_of(part: tuple[Segment, ...]) -> list[int]:
    """Return for every row of a tree its parent row. The parent of the root, row 0, is 0."""
    # latest: position -> the last row so far that is there
    latest = dict[int, int]()
    parents = list[int]()
    for piece in part:
        for position in range(piece.start, piece.start + piece.count):
            row = len(parents)
            parents.append(latest.get(position - 1, row))
            latest[position] = row
    return parents
