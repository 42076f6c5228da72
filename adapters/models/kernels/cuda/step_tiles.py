"""The tiles of a step's rows for attention on a CUDA device: which tables there are, and when they are planned."""

from __future__ import annotations

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.kernels.cuda.tiles import count_parts, rows_to_plan
from adapters.models.kernels.interfaces.layer_interface import NARROW
from adapters.models.kernels.step_batch import Batch
from adapters.models.kernels.triton import step_tiles
from adapters.models.kernels.triton_launch import launch

COLUMNS = 16  # pages of each row that are compared at once


@frozen
class TileKind:
    """The kind of a table of tiles.

    rows: of a tile, at most. shares: rows of several slots are in one tile where these begin with the same pages.
    window: keys that a row sees, up to and including its own; 0: all. Only tiles for all keys are shared.
    """

    rows: int
    shares: bool = False
    window: int = 0

    def count_limit(self, bucket: int, slots: int) -> int:
        """Return how many tiles a step of this bucket has at most."""
        limit = min(bucket, count_parts(bucket, self.rows) + slots + 1)
        return limit + min(bucket, slots) // 2 if self.shares else limit


@define
class StepTiles:
    """The step's tables of tiles on the device, by kind.

    fresh: the kinds that the running body has computed already. read: the kinds that a body has read, by its name,
    `merges` and `unpacks`: these choose its kernels. merges: see `CudaAttention.merges_in_kernel`. unpacks:
    see `CudaAttention.unpacks_codes`.
    """

    tables: dict[TileKind, Tensor] = field(factory=dict)
    fresh: set[TileKind] = field(factory=set)
    read: dict[tuple[str, bool, bool], set[TileKind]] = field(factory=dict)
    merges: bool = False
    unpacks: bool = False

    def find_read(self, body: str) -> set[TileKind]:
        """Return the kinds that a body has read, as it runs now. The set grows with what it reads."""
        return self.read.setdefault((body, self.merges, self.unpacks), set())


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

    def can_share(self, batch: Batch, rows: int, slots: int) -> bool:
        """Do tiles of this size have room for rows of several slots?

        The rows' pages must be those of all layers with such tiles, and the kernel must have room for the tiles.
        """
        return batch.pages is not None and TileKind(rows, shares=True).count_limit(batch.bucket, slots) <= NARROW

    def find_tiles(self, batch: Batch, kind: TileKind, slots: int) -> Tensor:
        """Return the step's tiles. Kernels read them without waiting for the kernel before, so they must exist long
        before.
        """
        plan: StepTiles = batch.plan
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
        shape = {"TILE": kind.rows, "SPLIT": self.split, "ROWS": rows_to_plan(batch.bucket)}
        given = (table, batch.bucket, len(table))
        if kind.shares:
            assert batch.pages is not None, "only rows in pages are shared"
            pages = batch.pages
            kernel = step_tiles.plan_shared_tiles
            shape |= {"COLUMNS": COLUMNS, "num_warps": 8}
            launch(kernel, (1,), batch.slots, batch.positions, pages, *given, pages.shape[1], **shape)
        else:
            shape |= {"WINDOW": kind.window, "num_warps": 4}
            launch(step_tiles.plan_tiles, (1,), batch.slots, batch.positions, *given, **shape)
        plan.fresh.add(kind)
