"""Files: other programs can read them, and nothing but the very file that we would write is taken for it."""

from __future__ import annotations

import io
import json
import shutil
import struct
import subprocess
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
import zstandard
from attrs import evolve

from adapters.store.block_keys import chain_keys, compute_root, derive_checkpoint_key, pack_tokens
from adapters.store.file_description import read_head
from adapters.store.files import file_format, seekable
from adapters.store.files.codec import CodecChooser, choose_codec, compute_ratio
from adapters.store.files.expected import Expected
from adapters.store.files.file_format import (
    FRAME,
    FileHead,
    Newer,
    Outdated,
    Run,
    digest_sums,
    encode_head,
    encode_run,
    format_name,
    parse_head,
    parse_name,
)
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.files.read_run import RunFile
from adapters.store.files.seekable import Damaged
from adapters.transfer.copy_rows import view_tensors
from tests.store.kit import BLOCK_SIZE, DRAFT, EVERYTHING, LAYOUT, OTHER, ROWS, buffer_of, rows_of, same

TOKENS = tuple(range(100, 140))
KEYS = chain_keys(compute_root(LAYOUT.identity, BLOCK_SIZE), pack_tokens(TOKENS), BLOCK_SIZE)
RUN = Run(8, KEYS[1], KEYS[2:], pack_tokens(TOKENS[8:]))
NO_SUMS = digest_sums([])
WIDE = evolve(LAYOUT, rows=evolve(ROWS, heads=8, width=1280))  # several frames


def blob(layout=LAYOUT, level: int = -5, run: Run = RUN) -> bytes:
    data = buffer_of(rows_of(TOKENS, run.start, layout, run.kind), layout, run.kind).data.numpy().data
    return b"".join(encode_run(run, layout, data, seekable.create_compressor(level)))


def read(path: Path, raw: bytes, layout=LAYOUT, run: Run = RUN) -> dict[str, torch.Tensor]:
    (path / "file").write_bytes(raw)
    folder, data = PrivateFolder.open(path), torch.empty(layout.compute_size(run.kind, run.length), dtype=torch.uint8)
    try:
        with ThreadPoolExecutor(2) as pool:
            RunFile(folder, "file", Expected(len(raw), run, layout), pool).readinto(data.numpy().data)
    finally:
        folder.close()
    return dict(view_tensors(layout.get_specs(run.kind, run.length), data))


@pytest.fixture
def private(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.mark.parametrize("level", [-5, 1])
@pytest.mark.parametrize("layout", [LAYOUT, WIDE], ids=["one frame", "several frames"])
def test_what_is_written_is_read_back_bit_for_bit(private: Path, layout, level: int) -> None:
    assert same(read(private, blob(layout, level), layout), rows_of(TOKENS, 8, layout))


@pytest.mark.parametrize("in_cache", [True, False])
def test_both_ways_of_reading_give_the_same(private: Path, monkeypatch: pytest.MonkeyPatch, in_cache: bool) -> None:
    """Through the page cache, and past it where the file system can do that; frames begin anywhere in a page."""
    monkeypatch.setattr("adapters.store.files.read_run.is_cached", lambda *_: in_cache)
    for layout in (LAYOUT, WIDE):
        assert same(read(private, blob(layout), layout), rows_of(TOKENS, 8, layout))
        with pytest.raises(Damaged):
            read(private, blob(layout)[:-1], layout)


@pytest.mark.parametrize("level", [-5, 1])
def test_zstandard_and_safetensors_alone_open_a_file(level: int) -> None:
    """The recipe of docs/CACHE_FORMAT.md."""
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(blob(WIDE, level)), read_across_frames=True) as reader:
        content = reader.read()
    tensors = safetensors.torch.load(content)
    assert tensors.pop("tokens").tolist() == list(TOKENS[8:])
    assert same(tensors, rows_of(TOKENS, 8, WIDE))
    about = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    assert about == {
        "rekindle_kv": "4",
        "kind": "rows",
        "identity": WIDE.identity,
        "grain": "4",
        "start": "8",
        "parent": KEYS[1].hex(),
        "key": KEYS[-1].hex(),
        "sums": about["sums"],
    }


DRAFT_KEYS = chain_keys(EVERYTHING.compute_root("draft"), pack_tokens(TOKENS), BLOCK_SIZE)
DRAFT_RUN = Run(8, DRAFT_KEYS[1], DRAFT_KEYS[2:], pack_tokens(TOKENS[8:]), "draft")
CHECKPOINT = Run(36, KEYS[-1], (derive_checkpoint_key(KEYS[-1]),), pack_tokens(TOKENS[36:]), "state", 12)


@pytest.mark.parametrize("run", [DRAFT_RUN, CHECKPOINT], ids=["draft", "state"])
def test_drafts_and_checkpoints_are_files_like_rows(private: Path, run: Run) -> None:
    raw, truth = blob(EVERYTHING, run=run), rows_of(TOKENS, run.start, EVERYTHING, run.kind)
    assert same(read(private, raw, EVERYTHING, run), truth)
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw), read_across_frames=True) as reader:
        tensors = safetensors.torch.load(reader.read())
    assert tensors.pop("tokens").tolist() == list(TOKENS[run.start :])
    assert same(tensors, truth)
    assert parse_head(encode_head(run, EVERYTHING, NO_SUMS)) == FileHead(run, LAYOUT.identity, BLOCK_SIZE, NO_SUMS)


def test_another_drafts_rows_have_other_keys() -> None:
    other = evolve(EVERYTHING, draft=evolve(DRAFT, identity="ee" * 16))
    assert other.compute_root("rows") == EVERYTHING.compute_root("rows")
    assert other.compute_root("draft") != EVERYTHING.compute_root("draft")


def test_the_seek_table_finds_every_frame_by_itself() -> None:
    raw = blob(WIDE)
    length = seekable.compute_table_size(seekable.parse_frame_count(raw[-9:]))
    frames = seekable.parse_table(raw[-length:], len(raw))
    assert len(frames) > 3
    assert [content for _, content in frames[1:-1]] == [FRAME] * (len(frames) - 2)
    at = 0
    for packed, content in frames:
        assert len(zstandard.ZstdDecompressor().decompress(raw[at : at + packed])) == content
        at += packed


def test_a_file_says_what_it_is() -> None:
    assert parse_head(encode_head(RUN, LAYOUT, NO_SUMS)) == FileHead(RUN, LAYOUT.identity, BLOCK_SIZE, NO_SUMS)
    assert parse_name(format_name(KEYS[-1], 77)) == (KEYS[-1], 77)
    for odd in (
        "journal",
        "LOCK",
        "x.safetensors.zst",
        format_name(KEYS[-1], 1) + "x",
        "damaged-" + format_name(KEYS[0], 1),
    ):
        assert parse_name(odd) is None


@pytest.mark.parametrize("level", [-5, 1])
def test_no_flipped_bit_gives_other_rows(private: Path, level: int) -> None:
    """Every byte of the head and the table, and bytes all over the rows."""
    raw = blob(level=level)
    first = seekable.parse_table(raw[-seekable.compute_table_size(2) :], len(raw))[0][0]
    places = {*range(first + 24), *range(len(raw) - 40, len(raw)), *range(0, len(raw), 37)}
    truth, refused = rows_of(TOKENS, 8), 0
    for place in sorted(places):
        flipped = bytearray(raw)
        flipped[place] ^= 1 << (place % 8)
        try:
            assert same(read(private, bytes(flipped)), truth), f"byte {place}"
        except Damaged:
            refused += 1
    assert refused >= len(places) - 8, "a few bits of a frame say nothing"


def test_no_truncated_padded_or_zeroed_file_is_taken(private: Path) -> None:
    raw = blob(WIDE)
    odd = [raw[:cut] for cut in range(0, len(raw), 1 << 16)]
    odd += [raw[:-1], raw + b"x", raw + bytes(4096), bytes(len(raw)), raw[:-4096] + bytes(4096), raw + raw, b""]
    for broken in odd:
        with pytest.raises(Damaged):
            read(private, broken, WIDE)


def test_a_whole_file_of_something_else_is_not_taken(private: Path) -> None:
    other_tokens = evolve(RUN, tokens=pack_tokens(tuple(range(300, 332))))
    changes = ({"dtype": "BF16"}, {"names": ROWS.names[::-1]}, {"heads": 1, "width": 16})
    others = [blob(OTHER), blob(run=other_tokens)]
    others += [blob(evolve(LAYOUT, rows=evolve(ROWS, **change))) for change in changes]
    for other in others:
        with pytest.raises(Damaged):
            read(private, other)


def forged(table: bytes) -> bytes:
    raw = blob()
    return raw[: -seekable.compute_table_size(2)] + table


def test_forged_sizes_are_refused_before_anything_is_allocated(private: Path) -> None:
    raw = blob()
    (a, b), (c, d) = seekable.parse_table(raw[-seekable.compute_table_size(2) :], len(raw))
    huge = 2**32 - 1
    tables = [
        seekable.encode_table([(a, huge), (c, d)]),
        seekable.encode_table([(a, b), (c, huge)]),
        seekable.encode_table([(huge, b), (c, d)]),
        seekable.encode_table([(a, b), (c, d), (0, 0)]),
        seekable.encode_table([(a + 1, b), (c - 1, d)]),
        seekable.FOOT.pack(huge, 0, seekable.SEEKABLE),
        struct.pack("<II", 0, 0),
    ]
    for table in tables:
        with pytest.raises(Damaged):
            read(private, forged(table))


@pytest.mark.parametrize("content", [1 << 30, 1 << 42])
def test_a_frame_that_says_it_is_huge_is_refused_by_its_header(content: int) -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 20)))
    lying = frame[:4] + bytes([0xE0 | 0x04]) + content.to_bytes(8, "little") + frame[9:]
    with pytest.raises(Damaged):
        seekable.decompress(bytes(lying), memoryview(bytearray(16)))


@pytest.mark.parametrize(
    ("change", "raised"),
    [
        ({"rekindle_kv": "5"}, Newer),
        ({"rekindle_kv": "2"}, Outdated),
        ({"rekindle_kv": "3"}, Outdated),
        ({"rekindle_kv": "one"}, Damaged),
        ({"kind": "other"}, Damaged),
        ({"kind": "state", "since": "0"}, Damaged),
        ({"kind": ["rows"]}, Damaged),
        ({"grain": "0"}, Damaged),
        ({"grain": "-4"}, Damaged),
        ({"grain": "5"}, Damaged),
        ({"start": str(1 << 40)}, Damaged),
        ({"start": "3"}, Damaged),
        ({"parent": "00"}, Damaged),
        ({"key": "11" * 16}, Damaged),
        ({"identity": None}, Damaged),
    ],
)
def test_a_header_that_cannot_be_is_refused(change: dict, raised: type[Exception]) -> None:
    raw = encode_head(RUN, LAYOUT, NO_SUMS)
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["__metadata__"] |= change
    if change == {"identity": None}:
        del header["__metadata__"]["identity"]
    text = json.dumps(header).encode()
    with pytest.raises(raised):
        parse_head(len(text).to_bytes(8, "little") + text + RUN.tokens)


@pytest.mark.parametrize("raw", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x04" + bytes(7) + b"null", bytes(64)])
def test_a_header_that_is_none_is_refused(raw: bytes) -> None:
    with pytest.raises(Damaged):
        parse_head(raw)


def test_a_header_nested_beyond_measure_is_refused() -> None:
    text = b"[" * 100_000
    with pytest.raises(Damaged):
        parse_head(len(text).to_bytes(8, "little") + text)


def test_the_first_frame_is_enough_to_know_a_file(private: Path) -> None:
    path = private / "file"
    path.write_bytes(blob(WIDE))
    with path.open("rb") as file:
        said = read_head(file.fileno(), path.stat().st_size)
    assert (said.run, said.identity, said.block_size) == (RUN, WIDE.identity, BLOCK_SIZE)


def test_links_and_pipes_are_not_read(private: Path) -> None:
    import os  # noqa: PLC0415

    (private / "real").write_bytes(blob())
    (private / "link").symlink_to("real")
    os.mkfifo(private / "pipe")
    folder = PrivateFolder.open(private)
    for name in ("link", "pipe"):
        with pytest.raises(OSError):  # noqa: PT011 - which one depends
            RunFile(folder, name, Expected(1, RUN, LAYOUT), ThreadPoolExecutor(1))
    folder.close()


@pytest.mark.parametrize(
    ("store", "zstd", "better"),
    [(0, 0, "store"), (0, 5, "store"), (100, 0, "store"), (100, 95, "store"), (100, 89, "zstd"), (100, 200, "store")],
)
def test_the_codec_is_what_restores_sooner(store: int, zstd: int, better: str) -> None:
    assert choose_codec(compute_ratio(store, zstd)) == better


@pytest.mark.parametrize(
    ("store", "zstd", "ratio"),
    [(0, 5, 0), (5, 0, 0), (100, 100, 1000), (100, 120, 1200), (1_000_000, 1, 1), (3, 4, 1333)],
)
def test_codecs_are_compared_in_thousandths(store: int, zstd: int, ratio: int) -> None:
    assert compute_ratio(store, zstd) == ratio


def test_auto_is_what_was_measured_and_a_codec_that_was_asked_for_stays() -> None:
    content = bytes(range(64)) * 4096
    assert CodecChooser("auto").choice == "store"
    assert CodecChooser("auto", "zstd").choice == "zstd"
    assert CodecChooser("store", "zstd").choice == "store"
    assert len(CodecChooser("auto", "zstd").create_compressor().compress(content)) < len(content) // 10


def test_the_command_line_of_zstd_opens_a_file(tmp_path: Path) -> None:
    if shutil.which("zstd") is None:
        pytest.skip("no zstd here")
    file = tmp_path / "rows.safetensors.zst"
    file.write_bytes(blob(WIDE))
    subprocess.run(["zstd", "-d", "-q", str(file)], check=True)
    tensors = safetensors.torch.load_file(tmp_path / "rows.safetensors")
    assert tensors.pop("tokens").tolist() == list(TOKENS[8:])
    assert same(tensors, rows_of(TOKENS, 8, WIDE))


def test_frames_that_claim_terabytes_are_counted_before_they_are_listed() -> None:
    frames = [(100, 100), *[(16, (1 << 32) - 1)] * 16_000]
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match="frames' sizes"):
            file_format.check_frames(frames, sum(content for _, content in frames[1:]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
