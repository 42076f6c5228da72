"""The identity that a cache is kept under: everything that serves is in it, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve

from adapters import demo
from adapters.models.kernels.formats.row_format import Rows, read_row_types
from adapters.models.numerics.probe_result import Numerics
from adapters.models.open_checkpoint import Checkpoint
from engine.loading.identity import compute_identity
from tests.store.kit import LAYOUT, disk_store, kept, save, settled

FOUND = Numerics("buckets", (4, 8, 64, 256), 64, 256, "cpu", 2, "class one", 0.5, 100, 7)
TOKENS = tuple(range(1, 41))

KINDS = ("int4", "int3.5", "k=int8,v=int4", "k=int4,v=int8")


def named(
    numerics: Numerics = FOUND,
    dtype: torch.dtype = torch.bfloat16,
    mode: str = "exact",
    bits: int | None = None,
    rows: Rows | None = None,
) -> str:
    """bits: that weights are rounded to."""
    checkpoint = Checkpoint.open(demo.FOLDER)
    return compute_identity(
        checkpoint if bits is None else checkpoint.with_quantisation(bits), dtype, numerics, mode, rows
    )


OTHERS = {
    "buckets": lambda: named(evolve(FOUND, buckets=(4, 8, 256))),
    "mode of the probe": lambda: named(evolve(FOUND, mode="grid")),
    "block_size": lambda: named(evolve(FOUND, block_size=256)),
    "numerics class": lambda: named(evolve(FOUND, numerics_class="class two")),
    "dtype": lambda: named(dtype=torch.float32),
    "mode": lambda: named(mode="fast"),
    "rows in int8": lambda: named(rows=torch.int8),
    "rows in fp8": lambda: named(rows=torch.float8_e4m3fn),
    **{f"rows in {kind}": lambda kind=kind: named(rows=read_row_types(kind, torch.bfloat16)) for kind in KINDS},
    "weights in 8 bits": lambda: named(bits=8),
    "weights in 4 bits": lambda: named(bits=4),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_what_is_computed_otherwise_shares_nothing(tmp_path: Path, other) -> None:
    names = named(), other()
    assert names[0] != names[1]
    for mine, theirs in (names, names[::-1]):
        folder = tmp_path / mine
        first = disk_store(folder, layout=evolve(LAYOUT, identity=mine))
        save(first, TOKENS)
        first.count_shared_tokens(TOKENS, 5)
        settled(first)
        assert first.close()
        second = disk_store(folder, layout=evolve(LAYOUT, identity=theirs))
        settled(second)
        assert kept(second, TOKENS) == 0
        assert second.count_shared_tokens(TOKENS, 5) == 0
        assert second.close()


def test_rows_of_each_type_are_no_others() -> None:
    kinds = ("auto", "int8", *KINDS)
    assert len({named(rows=read_row_types(kind, torch.bfloat16)) for kind in kinds}) == len(kinds)
    assert named(rows=read_row_types("bf16", torch.bfloat16)) == named(), "the type that is computed in has no name"


def test_weights_of_one_number_of_bits_are_not_those_of_another() -> None:
    assert named(bits=8) != named(bits=4)
    assert named(bits=4) == named(bits=4)


def test_how_the_probe_went_changes_nothing() -> None:
    assert named(evolve(FOUND, seconds=9.0, checks=1, spans=1, failures=("16: slot 1",))) == named()
