"""The tiles of a step's rows for attention on a CUDA device: which tables there are, and when they are planned."""

from __future__ import annotations

from typing import Literal

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from adapters.models.kernels.cuda.tiles import count_parts, rows_to_plan
from adapters.models.kernels.interfaces.layer_interface import NARROW
from adapters.models.kernels.step_batch import Batch
from adapters.models.kernels.triton import step_tiles
from adapters.models.kernels.triton_launch import launch

COLUMNS = 16  # pages of each row that are compared at once
# The first rows of a forward with rows of prompts. Those that are the only ones of their slot can have tiles of their
# own. A decode step has no more rows.
APART_ROWS = 64


@frozen
class TileKind:
    """The kind of a table of tiles.

    rows: of a tile, at most. shares: rows of several slots are in one tile where these begin with the same pages.
    window: keys that a row sees, up to and including its own; 0: all. Only tiles for all keys are shared.
    apart: which rows there are tiles for, where decode rows attend apart from rows of prompts (`StepTiles.apart`):
    "alone" for decode rows, "chains" for all others.
    """

    rows: int
    shares: bool = False
    window: int = 0
    apart: Literal["", "alone", "chains"] = ""

    def count_limit(self, bucket: int, slots: int) -> int:
        """Return how many tiles a step of this bucket has at most."""
        bucket = min(bucket, APART_ROWS) if self.apart == "alone" else bucket
        limit = min(bucket, count_parts(bucket, self.rows) + slots + 1)
        return limit + min(bucket, slots) // 2 if self.shares else limit


@define
class StepTiles:
    """The step's tables of tiles on the device, by kind.

    fresh: the kinds that the running body has computed already. read: the kinds that a body has read, by its name,
    `merges`, `unpacks` and `apart`: these choose its kernels. merges: see `CudaAttention.merges_in_kernel`. unpacks:
    see `CudaAttention.unpacks_codes`. apart: see `CudaAttention.attends_apart`. alone_positions: int64 `[APART_ROWS]`,
    where rows attend apart: positions of rows that are the only ones of their slot, and -1 for others.
    """

    tables: dict[TileKind, Tensor] = field(factory=dict)
    fresh: set[TileKind] = field(factory=set)
    read: dict[tuple[str, bool, bool, bool], set[TileKind]] = field(factory=dict)
    merges: bool = False
    unpacks: bool = False
    apart: bool = False
    alone_positions: Tensor | None = None

    def find_read(self, body: str) -> set[TileKind]:
        """Return the kinds that a body has read, as it runs now. The set grows with what it reads."""
        return self.read.setdefault((body, self.merges, self.unpacks, self.apart), set())


@define(eq=False)
class TilePlanner:
    """Plans the tiles of steps on the device.

    split: keys of a split of attention. running: the body that runs now. planned_bodies: names of the bodies that have
    read the step's tiles.
    """

    device: torch.device
    pdl: bool | None
    split: int
    running: str = ""
    planned_bodies: set[str] = field(init=False, factory=set)
    _touched: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._touched = torch.zeros(1, device=self.device)

    def find_tiles(self, batch: Batch, kind: TileKind, slots: int, *, may_share: bool = False) -> Tensor:
        """Return the step's tiles. Kernels read them without waiting for the kernel before, so they must exist long
        before.

        may_share: tiles may have rows of several slots. They do if the rows' pages are those of all layers with such
        tiles, and if the kernel has room for the tiles.
        """
        plan: StepTiles = batch.plan
        sharing = evolve(kind, shares=True)
        if may_share and batch.pages is not None and sharing.count_limit(batch.bucket, slots) <= NARROW:
            kind = sharing
        if kind not in plan.tables:
            limit = kind.count_limit(batch.bucket, slots)
            plan.tables[kind] = torch.zeros(limit, 8, dtype=torch.int32, device=self.device)
        if kind not in plan.fresh:
            self._plan_kind(batch, kind)
            self._end_planning()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        self.planned_bodies.add(self.running)
        plan.find_read(self.running).add(kind)
        return plan.tables[kind]

    def plan_step(self, batch: Batch) -> None:
        """Compute the step's tiles on the device, of every kind that the running body has read so far."""
        for kind in batch.plan.find_read(self.running):
            self._plan_kind(batch, kind)
        self._end_planning()

    def _end_planning(self) -> None:
        if self.pdl:  # a kernel with PDL could begin before the tiles are written, one behind a usual launch cannot
            self._touched.abs_()

    def _plan_kind(self, batch: Batch, kind: TileKind) -> None:
        plan: StepTiles = batch.plan
        table = plan.tables[kind]
        is_alone = kind.apart == "alone"
        shape = {"TILE": kind.rows, "SPLIT": self.split}
        # A planned row clears one unused tile at most.
        shape |= {"ROWS": rows_to_plan(NARROW if is_alone else batch.bucket)}
        shape |= {"APART": APART_ROWS if kind.apart else 0}
        given = (table, batch.bucket, len(table))
        assert len(table) <= shape["ROWS"], (kind, batch.bucket)
        if is_alone:
            self._find_rows_alone(batch)
        if kind.shares:
            assert batch.pages is not None, "only rows in pages are shared"
            pages = batch.pages
            kernel = step_tiles.plan_shared_tiles
            shape |= {"COLUMNS": COLUMNS, "num_warps": 8}
            launch(kernel, (1,), batch.slots, batch.positions, pages, *given, pages.shape[1], **shape)
        else:
            shape |= {"WINDOW": kind.window, "ALONE": is_alone, "num_warps": 4}
            launch(step_tiles.plan_tiles, (1,), batch.slots, batch.positions, *given, **shape)
        plan.fresh.add(kind)

    def _find_rows_alone(self, batch: Batch) -> None:
        plan: StepTiles = batch.plan
        if plan.alone_positions is None:
            plan.alone_positions = torch.zeros(APART_ROWS, dtype=torch.int64, device=self.device)
        given = (batch.slots, batch.positions, plan.alone_positions, batch.bucket)
        launch(step_tiles.find_rows_alone, (1,), *given, ROWS=APART_ROWS, num_warps=2)
