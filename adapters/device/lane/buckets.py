"""The row counts that forwards run with: a batch is padded to the smallest one that has room for it."""

from __future__ import annotations

from collections.abc import Sequence

# Up to here `fast` runs real row counts. Padding costs most there; and every count keeps buffers, so it ends there.
REAL_ROWS = 16


def row_counts(buckets: Sequence[int], *, fast: bool) -> tuple[int, ...]:
    """Return the row counts that an executor of these buckets runs forwards with. A shard must accept all of them."""
    return tuple(sorted({*buckets, *(range(1, REAL_ROWS + 1) if fast else ())}))


def bucket_of(buckets: Sequence[int], rows: int) -> int:
    """Return the smallest bucket with room for this many rows. buckets: ascending. Raises ValueError if none has it."""
    for bucket in buckets:
        if bucket >= rows:
            return bucket
    raise ValueError(f"{rows} rows are more than the largest bucket, {buckets[-1]}")
