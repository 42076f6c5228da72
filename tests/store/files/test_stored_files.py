"""Files whose frames are not compressed: written without a copy of the rows, and read by one call of the library."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from adapters.models.kernels.cpu.native.native_library import find_library
from adapters.sequence_layout import RowSpec
from adapters.store.block_keys import chain_keys, pack_tokens
from adapters.store.files import read_run, seekable
from adapters.store.files.codec import create_compressor
from adapters.store.files.file_format import Layout, Run, encode_run, encode_run_in_place
from adapters.store.files.plain_frames import PlainCompressor, create_plain_compressor
from adapters.store.files.read_run import Expected, fill_target
from adapters.store.files.seekable import Damaged
from adapters.store.shared.folder_client import open_file

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(find_library() is None, reason="no compiled library")]
LAYOUT = Layout("ab" * 16, 4, RowSpec(("layers.0.k", "layers.0.v"), 1, 8 << 10, "I8"))
TWO_FRAMES, ONE_FRAME, SHORT_END, SHORT_FILE = 148, 64, 128 + 4, 4  # tokens of 16 KiB
NARROW = evolve(LAYOUT, rows=evolve(LAYOUT.rows, width=8 * 1000))  # 132 tokens end with a frame of 14,848 bytes


def make_run(tokens: int, first: int = 0, layout: Layout = LAYOUT) -> Run:
    root, packed = layout.compute_root("rows"), pack_tokens(range(first, first + tokens))
    return Run(0, root, chain_keys(root, packed, layout.block_size), packed)


def make_rows(run: Run, layout: Layout = LAYOUT) -> np.ndarray:
    size = layout.compute_size(run.kind, run.length)
    return np.random.default_rng(run.tokens[0]).integers(0, 256, size, dtype=np.uint8)


def encode(run: Run, layout: Layout = LAYOUT) -> bytes:
    return b"".join(encode_run(run, layout, make_rows(run, layout).data, create_compressor("store")))


def read(path: Path, raw: bytes, run: Run, layout: Layout = LAYOUT, *, helpers: bool = False) -> np.ndarray:
    """Return the rows of a file, as the shared tier reads them. Raises Damaged."""
    path.write_bytes(raw)
    found = np.zeros(layout.compute_size(run.kind, run.length), np.uint8)
    with ThreadPoolExecutor(2) as pool, open_file(str(path)) as file:
        fill_target(file, Expected(len(raw), run, layout), pool if helpers else None, found.data)
    return found


def forbid(*_: object) -> None:
    raise AssertionError("a frame was decoded after all")


@pytest.mark.parametrize("layout", [LAYOUT, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("tokens", [TWO_FRAMES, ONE_FRAME, SHORT_END, SHORT_FILE])
def test_what_is_written_without_a_copy_is_the_same_file(tokens: int, layout: Layout) -> None:
    run = make_run(tokens, layout=layout)
    compressor = create_plain_compressor()
    assert isinstance(compressor, PlainCompressor)
    rows = make_rows(run, layout)
    parts = encode_run_in_place(run, layout, rows.data, compressor)
    assert b"".join(parts) == encode(run, layout)
    if tokens == TWO_FRAMES:
        shown = sum(len(part) for part in parts if np.shares_memory(np.frombuffer(part, np.uint8), rows))
        assert shown == rows.nbytes, "nothing of the rows is copied"


@pytest.mark.parametrize("helpers", [False, True], ids=["alone", "with helpers"])
@pytest.mark.parametrize("layout", [LAYOUT, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("tokens", [TWO_FRAMES, ONE_FRAME, SHORT_END, SHORT_FILE])
def test_rows_are_read_back_bit_for_bit(tmp_path: Path, tokens: int, layout: Layout, helpers: bool) -> None:
    run = make_run(tokens, layout=layout)
    found = read(tmp_path / "file", encode(run, layout), run, layout, helpers=helpers)
    assert np.array_equal(found, make_rows(run, layout))


def test_one_call_reads_all_frames_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(TWO_FRAMES)
    raw = encode(run)
    calls = list[int]()
    library = find_library()
    assert library is not None

    class Counted:
        def rekindle_read_frames(self, *arguments: int) -> int:
            calls.append(arguments[5])
            return int(library.code.rekindle_read_frames(*arguments))

    monkeypatch.setattr("adapters.store.files.plain_frames.load_functions", Counted)
    monkeypatch.setattr(read_run, "read_batches", forbid)
    assert np.array_equal(read(tmp_path / "file", raw, run), make_rows(run))
    assert calls == [make_rows(run).nbytes]


def flip(raw: bytes, bit: int) -> bytes:
    harmed = bytearray(raw)
    harmed[bit // 8] ^= 1 << bit % 8
    return bytes(harmed)


def list_edges(raw: bytes) -> list[int]:
    """Return the offsets at which frames and the table begin, and the end of the file."""
    sizes = seekable.parse_table(memoryview(raw)[-seekable.compute_table_size(3) :], len(raw))
    edges = [0]
    for packed, _ in sizes:
        edges.append(edges[-1] + packed)
    return [*edges, len(raw)]


@pytest.mark.parametrize("helpers", [False, True], ids=["alone", "with helpers"])
def test_a_wrong_bit_is_found_wherever_it_is(tmp_path: Path, helpers: bool) -> None:
    """The head, the heads of frames and of blocks, rows, checksums and the table; few of them are all tried."""
    run = make_run(TWO_FRAMES)
    raw = encode(run)
    edges = list_edges(raw)
    chance = random.Random(7)
    unused = {8 * (edge + 4) + 4 for edge in edges}  # a bit of a frame's descriptor that decoders do not look at
    bits = {8 * edge + bit for edge in edges[:-1] for bit in range(8 * 12)}  # beginnings
    bits |= {8 * edge - bit for edge in edges[1:] for bit in range(1, 40)}  # ends, checksums among them
    chosen = chance.sample(sorted(bits - unused), 90) + [chance.randrange(8 * len(raw)) for _ in range(30)]
    for bit in chosen:
        if bit not in unused:
            with pytest.raises(Damaged):
                read(tmp_path / "file", flip(raw, bit), run, helpers=helpers)
    for bit in unused:
        if bit < 8 * edges[-2]:
            found = read(tmp_path / "file", flip(raw, bit), run, helpers=helpers)
            assert np.array_equal(found, make_rows(run)), "zstd reads what our own reader does not know"


def swap_rows(raw: bytes, other: bytes) -> bytes:
    edges, theirs = list_edges(raw), list_edges(other)
    return raw[: edges[1]] + other[theirs[1] : theirs[3]] + raw[edges[3] :]


def swap_order(raw: bytes) -> bytes:
    """Both blocks of 128 KiB that follow the first frame's head change places."""
    at = list_edges(raw)[1] + 9
    size = 3 + (128 << 10)
    return raw[:at] + raw[at + size : at + 2 * size] + raw[at : at + size] + raw[at + 2 * size :]


HARMS: dict[str, Callable[[bytes, bytes], bytes]] = {
    "cut": lambda raw, _: raw[:-1],
    "cut in its rows": lambda raw, _: raw[: len(raw) // 2],
    "longer": lambda raw, _: raw + b"x",
    "zeros": lambda raw, _: bytes(len(raw)),
    "another run": lambda _, other: other,
    "another run's rows": swap_rows,
    "blocks in another order": lambda raw, _: swap_order(raw),
    "one frame twice": lambda raw, _: raw[: list_edges(raw)[1]] + raw[list_edges(raw)[1] :][::-1],
}


@pytest.mark.parametrize("helpers", [False, True], ids=["alone", "with helpers"])
@pytest.mark.parametrize("how", HARMS)
def test_another_content_never_passes_for_the_run(tmp_path: Path, how: str, helpers: bool) -> None:
    run, other = make_run(TWO_FRAMES), make_run(TWO_FRAMES, 1000)
    raw = HARMS[how](encode(run), encode(other))
    with pytest.raises(Damaged):
        read(tmp_path / "file", raw, run, helpers=helpers)


def test_another_identity_is_another_file(tmp_path: Path) -> None:
    run = make_run(TWO_FRAMES)
    theirs = evolve(LAYOUT, identity="cd" * 16)
    with pytest.raises(Damaged, match="another model's"):
        read(tmp_path / "file", encode(run, theirs), run)


def test_a_file_that_shrinks_while_it_is_read_is_damaged(tmp_path: Path) -> None:
    """Its size was right when it was opened."""
    run = make_run(TWO_FRAMES)
    raw = encode(run)
    (tmp_path / "file").write_bytes(raw)
    with open_file(str(tmp_path / "file")) as file:
        os.truncate(tmp_path / "file", len(raw) - (1 << 20))
        with pytest.raises(Damaged):
            fill_target(file, Expected(len(raw), run, LAYOUT), None, memoryview(bytearray(make_rows(run).nbytes)))


@pytest.mark.parametrize("codec", ["zstd", "store"])
def test_frames_of_other_writers_are_decoded(tmp_path: Path, codec: str) -> None:
    """Compressed ones, and such as zstd makes where there is no compiled library."""
    run = make_run(TWO_FRAMES)
    rows = make_rows(run) % 4 if codec == "zstd" else make_rows(run)
    raw = b"".join(encode_run(run, LAYOUT, rows.data, seekable.create_compressor(1)))
    assert np.array_equal(read(tmp_path / "file", raw, run), rows)
