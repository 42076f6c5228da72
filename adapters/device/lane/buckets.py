"""With how many rows forwards run."""

from __future__ import annotations

from collections.abc import Sequence

REAL_ROWS = 16  # up to here `fast` runs real row counts: padding costs most there, and every count keeps its buffers


def row_counts(buckets: Sequence[int], *, fast: bool) -> tuple[int, ...]:
    """The row counts that an executor of these buckets runs forwards with: a shard must accept them all."""
    return tuple(sorted({*buckets, *(range(1, REAL_ROWS + 1) if fast else ())}))


def bucket_of(buckets: Sequence[int], rows: int) -> int:
    """The smallest that has room. buckets: ascending."""
    for bucket in buckets:
        if bucket >= rows:
            return bucket
    raise ValueError(f"{rows} rows are more than the largest bucket, {buckets[-1]}")
