"""Files whose frames are not compressed: written without a copy of the rows, and read by one call of the library."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zstandard
from attrs import evolve

from adapters.models.kernels.cpu.native.native_library import find_library
from adapters.sequence_layout import RowSpec, TensorSpec
from adapters.store.block_index import Entry
from adapters.store.block_keys import chain_keys, derive_checkpoint_key, pack_tokens
from adapters.store.file_description import make_entry
from adapters.store.files import plain_frames, seekable, stored_file
from adapters.store.files.block_sums import BLOCK_BYTES
from adapters.store.files.codec import create_compressor
from adapters.store.files.expected import Expected
from adapters.store.files.file_format import DraftLayout, Layout, Run, encode_run
from adapters.store.files.read_run import fill_target
from adapters.store.files.seekable import Damaged
from adapters.store.files.stored_file import PlannedRead, RowsToWrite, can_write_rows, plan_file, read_files
from adapters.store.run_read import RunRead, get_buffer
from adapters.store.shared import run_decoder
from adapters.store.shared.folder_client import FolderFile
from adapters.store.shared.run_decoder import RunDecoder
from adapters.store.slab_memory import SlabMemory

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(find_library() is None, reason="no compiled library")]
LAYOUT = Layout("ab" * 16, 4, RowSpec(("layers.0.k", "layers.0.v"), 1, 8 << 10, "I8"))
TWO_FRAMES, ONE_FRAME, SHORT_END, SHORT_FILE = 148, 64, 128 + 4, 4  # tokens of 16 KiB
THREE_FRAMES = 256 + 12  # the first two are read at once
NARROW = evolve(LAYOUT, rows=evolve(LAYOUT.rows, width=8 * 1000))  # 132 tokens end with a frame of 14,848 bytes


def make_run(tokens: int, first: int = 0, layout: Layout = LAYOUT) -> Run:
    root, packed = layout.compute_root("rows"), pack_tokens(range(first, first + tokens))
    return Run(0, root, chain_keys(root, packed, layout.block_size), packed)


def make_rows(run: Run, layout: Layout = LAYOUT) -> np.ndarray:
    size = layout.compute_size(run.kind, run.length)
    return np.random.default_rng(run.tokens[0]).integers(0, 256, size, dtype=np.uint8)


def encode(run: Run, layout: Layout = LAYOUT) -> bytes:
    return b"".join(encode_run(run, layout, make_rows(run, layout).data, create_compressor("store")))


def write_rows(run: Run, layout: Layout = LAYOUT) -> bytes:
    """The same, as the shared tier writes it to a folder."""
    rows = make_rows(run, layout)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "file")
        RowsToWrite(run, layout, rows.ctypes.data).write(f"{folder}/new", str(file), replace=False)
        return file.read_bytes()


def read(path: Path, raw: bytes, run: Run, layout: Layout = LAYOUT, *, helpers: bool = False) -> np.ndarray:
    """Return the rows of a file, as the shared tier reads them: in one call, or with helpers. Raises Damaged."""
    path.write_bytes(raw)
    run_read = RunRead(make_entry(run, 1, len(raw), layout.compute_root("rows")))
    damaged = list[Entry]()
    decoder = RunDecoder(layout, SlabMemory(), damaged.append)
    file = FolderFile(str(path))
    try:
        with ThreadPoolExecutor(2) as pool:
            if helpers:
                return decoder.decode(run_read, file, pool).data.numpy()
        decoder.read_files([run_read], [str(path)], lambda: None)
        assert damaged == [run_read.entry] * isinstance(run_read.error, Damaged)
        return get_buffer(run_read).data.numpy()
    finally:
        file.close()


def forbid(*_: object) -> None:
    raise AssertionError("it was read in Python after all")


def decompress(raw: bytes) -> bytes:
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw), read_across_frames=True) as reader:
        return reader.read()


@pytest.mark.parametrize("replace", [False, True], ids=["new", "in place of another"])
@pytest.mark.parametrize("layout", [LAYOUT, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("tokens", [TWO_FRAMES, ONE_FRAME, SHORT_END])
def test_rows_are_written_from_where_they_are(tmp_path: Path, tokens: int, layout: Layout, replace: bool) -> None:
    """The file is the one of `encode_run`, but for its head, which is not compressed."""
    run = make_run(tokens, layout=layout)
    rows = make_rows(run, layout)
    assert can_write_rows(rows.nbytes)
    file, temporary = tmp_path / "file", tmp_path / "temporary"
    if replace:
        file.write_bytes(b"damaged")
    size = RowsToWrite(run, layout, rows.ctypes.data).write(str(temporary), str(file), replace=replace)
    raw, usual = file.read_bytes(), encode(run, layout)
    assert size == len(raw)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert decompress(raw) == decompress(usual)
    begin, usual_begin = list_edges(raw)[1], list_edges(usual)[1]
    table = seekable.compute_table_size(len(list_edges(raw)) - 2)
    assert raw[begin:-table] == usual[usual_begin:-table]
    for helpers in (False, True):
        assert np.array_equal(read(tmp_path / "copy", raw, run, layout, helpers=helpers), rows)


def test_short_rows_are_compressed_instead() -> None:
    assert not can_write_rows(make_rows(make_run(SHORT_FILE, layout=NARROW), NARROW).nbytes)


def test_writing_fails_as_python_would_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(TWO_FRAMES)
    rows = make_rows(run)

    def write(temporary: Path, path: Path, *, replace: bool = False) -> None:
        RowsToWrite(run, LAYOUT, rows.ctypes.data).write(str(temporary), str(path), replace=replace)

    temporary, file = tmp_path / "temporary", tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "gone" / "temporary", tmp_path / "gone" / "file")
    file.write_bytes(b"first")
    with pytest.raises(FileExistsError):
        write(temporary, file)
    assert file.read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    temporary.write_bytes(b"of another writer")
    with pytest.raises(FileExistsError):
        write(temporary, file, replace=True)
    assert temporary.read_bytes() == b"of another writer"
    temporary.unlink()
    with pytest.raises(NotADirectoryError):
        write(file / "temporary", file / "file")
    monkeypatch.setattr(stored_file, "pack_head", lack_memory)
    with pytest.raises(MemoryError):
        write(temporary, tmp_path / "another")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def lack_memory(_: object) -> bytes:
    raise MemoryError


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """The limit of the size of files stands for it. The call before it writes fewer bytes than it was given."""
    words = [sys.executable, "-c", FILL.format(root=str(Path(__file__).parents[3])), str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert ended.stdout.split() == ["EFBIG", "[]"] * 2, ended.stderr


FILL = """
import errno, os, resource, signal, sys
sys.path.insert(0, "{root}")
from tests.store.files.test_stored_files import LAYOUT, TWO_FRAMES, make_rows, make_run
from adapters.store.files.stored_file import RowsToWrite

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = make_run(TWO_FRAMES)
rows = make_rows(run)
place = sys.argv[1]
for most in ((1 << 20) + 77, rows.nbytes + 900):  # within the rows, and behind them
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    try:
        RowsToWrite(run, LAYOUT, rows.ctypes.data).write(f"{{place}}/new", f"{{place}}/file", replace=False)
    except OSError as error:
        print(errno.errorcode[error.errno], os.listdir(place))
"""


@pytest.mark.parametrize("helpers", [False, True], ids=["alone", "with helpers"])
@pytest.mark.parametrize("layout", [LAYOUT, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("tokens", [TWO_FRAMES, ONE_FRAME, SHORT_END, SHORT_FILE])
def test_rows_are_read_back_bit_for_bit(tmp_path: Path, tokens: int, layout: Layout, helpers: bool) -> None:
    run = make_run(tokens, layout=layout)
    found = read(tmp_path / "file", encode(run, layout), run, layout, helpers=helpers)
    assert np.array_equal(found, make_rows(run, layout))


@pytest.mark.parametrize("writer", [encode, write_rows], ids=["compressed head", "stored head"])
@pytest.mark.parametrize("tokens", [THREE_FRAMES, TWO_FRAMES, ONE_FRAME])
def test_one_call_reads_a_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, writer: Callable[[Run], bytes]
) -> None:
    monkeypatch.setattr(run_decoder, "fill_target", forbid)
    run = make_run(tokens)
    assert np.array_equal(read(tmp_path / "file", writer(run), run), make_rows(run))


def test_a_head_of_several_blocks_is_read_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a token id of four bytes for each token, and a block has 128 KiB. The heads of its blocks are checked."""
    layout = Layout("ab" * 16, 4, RowSpec(("layers.0.k",), 1, 8, "I8"))
    run = make_run(70_000, layout=layout)
    raw = write_rows(run, layout)
    assert list_edges(raw)[1] > 2 * BLOCK_BYTES
    with monkeypatch.context() as patched:
        patched.setattr(run_decoder, "fill_target", forbid)
        assert np.array_equal(read(tmp_path / "file", raw, run, layout), make_rows(run, layout))
    second = plain_frames.FRAME_HEAD + plain_frames.BLOCK_HEAD + BLOCK_BYTES
    for byte in (second, second + 1, second + 3, second + 3 + BLOCK_BYTES, list_edges(raw)[1] - 1):
        with pytest.raises(Damaged):
            read(tmp_path / "file", flip(raw, 8 * byte), run, layout)


def plan_read(path: Path, raw: bytes, run: Run, beyond: int = 0) -> tuple[PlannedRead, np.ndarray]:
    """Write a file, and return how it is read, and where. beyond: bytes of the place beyond a multiple of 64."""
    path.write_bytes(raw)
    plan = plan_file(len(raw), run, LAYOUT)
    assert plan is not None
    space = np.zeros(make_rows(run).nbytes + 128, np.uint8)
    begin = -space.ctypes.data % 64 + beyond
    place = space[begin : begin + space.nbytes - 128]
    return PlannedRead(plan, os.fsencode(path), place.ctypes.data), place


@pytest.mark.parametrize("beyond", [0, 16])
def test_files_are_read_together_and_each_is_told_apart(tmp_path: Path, beyond: int) -> None:
    """Memory that does not begin at a multiple of 64 is filled without the instructions for whole lines."""
    runs = [make_run(tokens, 1000 * tokens) for tokens in (THREE_FRAMES, TWO_FRAMES, ONE_FRAME, TWO_FRAMES)]
    raws = [write_rows(run) for run in runs]
    raws[1] = flip(raws[1], 8 * len(raws[1]) // 2)
    planned = [
        plan_read(tmp_path / str(number), raw, run, beyond)
        for number, (run, raw) in enumerate(zip(runs, raws, strict=True))
    ]
    (tmp_path / "2").unlink()
    assert read_files([read for read, _ in planned]) == ["read", "other", "other", "read"]
    for number in (0, 3):
        assert np.array_equal(planned[number][1], make_rows(runs[number]))


def test_only_what_the_page_cache_holds_is_read_where_that_is_asked_for(tmp_path: Path) -> None:
    """A file that is a hole has no pages there. A link is not followed, as the disk tier never does."""
    run = make_run(TWO_FRAMES)
    raw = write_rows(run)
    read, place = plan_read(tmp_path / "file", raw, run)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with (tmp_path / "hole").open("wb") as hole:
        hole.truncate(len(raw))
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        reads = [evolve(read, path=name) for name in (b"hole", b"link", b"file")]
        assert read_files(reads, folder, only_cached=True) == ["not_cached", "other", "read"]
        assert read_files(reads[:2], folder) == ["other", "read"]
    finally:
        os.close(folder)
    assert np.array_equal(place, make_rows(run))


def test_kinds_of_runs_have_heads_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap for the digest lies behind other metadata where there are a draft's rows, or a state."""
    monkeypatch.setattr(run_decoder, "fill_target", forbid)
    draft = DraftLayout("de" * 16, RowSpec(("draft.layers.0.k",), 1, 2 << 10, "I8"))
    layout = evolve(LAYOUT, draft=draft, state=(TensorSpec("layers.1.state", "F32", (300, 100)),))
    run = make_run(TWO_FRAMES, layout=layout)
    drafted = evolve(run, kind="draft", parent=layout.compute_root("draft"))
    state = Run(8, run.keys[-1], (derive_checkpoint_key(run.keys[-1]),), run.tokens[:16], "state", 4)
    for one in (run, drafted, state):
        assert np.array_equal(read(tmp_path / "file", encode(one, layout), one, layout), make_rows(one, layout))


def flip(raw: bytes, bit: int) -> bytes:
    harmed = bytearray(raw)
    harmed[bit // 8] ^= 1 << bit % 8
    return bytes(harmed)


def list_edges(raw: bytes) -> list[int]:
    """Return the offsets at which frames and the table begin, and the end of the file."""
    count = seekable.parse_frame_count(raw[-seekable.FOOT.size :])
    sizes = seekable.parse_table(memoryview(raw)[-seekable.compute_table_size(count) :], len(raw))
    edges = [0]
    for packed, _ in sizes:
        edges.append(edges[-1] + packed)
    return [*edges, len(raw)]


@pytest.mark.parametrize("writer", [encode, write_rows], ids=["compressed head", "stored head"])
@pytest.mark.parametrize("helpers", [False, True], ids=["alone", "with helpers"])
def test_a_wrong_bit_is_found_wherever_it_is(tmp_path: Path, helpers: bool, writer: Callable[[Run], bytes]) -> None:
    """The head, the heads of frames and of blocks, rows, checksums and the table; few of them are all tried."""
    run = make_run(TWO_FRAMES)
    raw = writer(run)
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


@pytest.mark.parametrize("writer", [encode, write_rows], ids=["compressed head", "stored head"])
@pytest.mark.parametrize("helpers", [False, True], ids=["alone", "with helpers"])
@pytest.mark.parametrize("how", HARMS)
def test_another_content_never_passes_for_the_run(
    tmp_path: Path, how: str, helpers: bool, writer: Callable[[Run], bytes]
) -> None:
    run, other = make_run(TWO_FRAMES), make_run(TWO_FRAMES, 1000)
    raw = HARMS[how](writer(run), writer(other))
    with pytest.raises(Damaged):
        read(tmp_path / "file", raw, run, helpers=helpers)


def test_another_identity_is_another_file(tmp_path: Path) -> None:
    run = make_run(TWO_FRAMES)
    theirs = evolve(LAYOUT, identity="cd" * 16)
    for raw in (encode(run, theirs), write_rows(run, theirs)):
        with pytest.raises(Damaged, match="another model's"):
            read(tmp_path / "file", raw, run)


def test_a_file_that_shrinks_while_it_is_read_is_damaged(tmp_path: Path) -> None:
    """Its size was right when it was opened."""
    run = make_run(TWO_FRAMES)
    raw = encode(run)
    (tmp_path / "file").write_bytes(raw)
    file = FolderFile(str(tmp_path / "file"))
    assert file.size == len(raw)
    os.truncate(tmp_path / "file", len(raw) - (1 << 20))
    with pytest.raises(Damaged):
        fill_target(file, Expected(len(raw), run, LAYOUT), None, memoryview(bytearray(make_rows(run).nbytes)))
    file.close()


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    run = make_run(TWO_FRAMES)
    expected = Expected(len(encode(run)), run, LAYOUT)
    plan = plan_file(expected.size, run, LAYOUT)
    assert plan is not None
    space = bytearray(make_rows(run).nbytes)
    address = np.frombuffer(space, np.uint8).ctypes.data
    os.mkfifo(tmp_path / "pipe")
    for name in ("nothing", "pipe", "."):
        assert read_files([PlannedRead(plan, os.fsencode(tmp_path / name), address)]) == ["other"]
        with pytest.raises((Damaged, FileNotFoundError)):
            fill_target(FolderFile(str(tmp_path / name)), expected, None, memoryview(space))


@pytest.mark.parametrize("codec", ["zstd", "store"])
def test_frames_of_other_writers_are_decoded(tmp_path: Path, codec: str) -> None:
    """Compressed ones, and such as zstd makes where there is no compiled library."""
    run = make_run(TWO_FRAMES)
    rows = make_rows(run) % 4 if codec == "zstd" else make_rows(run)
    raw = b"".join(encode_run(run, LAYOUT, rows.data, seekable.create_compressor(1)))
    assert np.array_equal(read(tmp_path / "file", raw, run), rows)
