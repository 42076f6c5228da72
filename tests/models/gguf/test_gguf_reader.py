"""GGUF files: every type against the `gguf` package, and headers that lie, which are refused in one line."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gguf
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.gguf import gguf_tensor, header
from adapters.checkpoint.gguf.few_bit_types import HOST_TYPES
from adapters.checkpoint.gguf.header import ListField, read_header
from adapters.checkpoint.gguf.types import INTEGERS, PACKINGS, REFUSED
from adapters.checkpoint.gguf.unpack_blocks import NUMBERS, UNPACK
from gguf import GGMLQuantizationType as Kind
from tests.examples import count_examples

ROWS = 37


def blocks_of(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Random bytes, except that what are scales are no infinities and no NaNs: their exponents are kept small."""
    count, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(kind).integers(0, 256, (rows * columns // count, size), dtype=np.uint8)
    highs = {Kind.Q6_K: [209], Kind.Q4_K: [1, 3], Kind.Q5_K: [1, 3], Kind.F32: [3], Kind.BF16: [1]}
    highs |= {
        Kind.Q2_K: [81, 83],
        Kind.Q3_K: [109],
        Kind.Q4_1: [1, 3],
        Kind.Q5_1: [1, 3],
        Kind.IQ1_M: [49, 51, 53, 55],
        Kind.MXFP4: [],
    }
    rows_of_scales = highs.get(kind, [1])
    data[:, rows_of_scales] &= 0xBB
    if kind is Kind.MXFP4:
        data[:, 0] &= 0x7F
    return data.reshape(rows, -1)


def write(path: Path, data: dict[str, tuple[np.ndarray, Kind]], **fields: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        writer.add_array(name, value) if isinstance(value, list) else writer.add_string(name, value)
    for name, (array, kind) in data.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a tensor of every type that is served."""
    kinds = [Kind(number) for number in PACKINGS]
    data = {kind.name: (blocks_of(kind, ROWS, 512), kind) for kind in kinds}
    path = tmp_path_factory.mktemp("gguf") / "every.gguf"
    return write(path, data, texts=["a", "", "é" * 5], numbers=[3, -1, 2])


def test_types_are_those_of_the_package() -> None:
    for number, packing in PACKINGS.items():
        assert (packing.name, (packing.count, packing.size)) == (Kind(number).name, gguf.GGML_QUANT_SIZES[Kind(number)])
    assert {number: Kind(number).name for number in REFUSED} == dict(REFUSED)
    assert {*PACKINGS, *REFUSED} == set(Kind), "each is served or refused by name"
    assert {packing.name for packing in (PACKINGS | INTEGERS).values()} == {*NUMBERS, *UNPACK, *HOST_TYPES}


@pytest.mark.parametrize("piece", [1 << 18, 5000])  # of all at once, and in pieces that end within rows
def test_every_type_has_the_package_s_values(everything: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tensor, "choose_piece_size", lambda _: piece)
    stored = read_header(everything).tensors
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(everything).tensors}
    assert stored.keys() == theirs.keys()
    for name, tensor in theirs.items():
        wanted = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        ours = gguf_tensor.make_tensor(stored[name])
        assert ours.shape == wanted.shape == (ROWS, 512)
        found = ours.read(name)
        assert found.dtype == ours.dtype == NUMBERS.get(name, torch.float32)
        assert torch.equal(found.float().view(torch.int32), wanted.view(torch.int32)), name
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            rounded = ours.with_dtype(dtype).read(name).to(dtype)
            assert torch.equal(rounded.view(torch.uint8), wanted.to(dtype).view(torch.uint8)), (name, dtype)


def test_lists_are_made_when_they_are_asked_for(everything: Path) -> None:
    found = read_header(everything)
    assert found.read_texts("texts") == ["a", "", "ééééé"]
    assert found.read_integers("numbers") == [3, -1, 2]
    assert found.fields["general.architecture"] == "llama"
    for name, what in {
        "numbers": "not a list of texts",
        "none": "missing",
        "general.architecture": "not a list",
    }.items():
        with pytest.raises(CheckpointError, match=what):
            found.read_texts(name)
    with pytest.raises(CheckpointError, match="texts is not a list of integers"):
        found.read_integers("texts")


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    block = np.frombuffer(np.float16(np.inf).tobytes() + bytes([1] * 32), np.uint8).reshape(1, 34)
    found = read_header(write(tmp_path / "a.gguf", {"w": (block, Kind.Q8_0)}))
    with pytest.raises(CheckpointError, match=r"a\.gguf: w has values that are no numbers, or infinite"):
        gguf_tensor.make_tensor(found.tensors["w"]).read("w")


def test_a_file_that_shrinks_is_an_error(everything: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(everything.read_bytes())
    found = read_header(path)
    path.write_bytes(everything.read_bytes()[:-600])
    with pytest.raises(CheckpointError, match="truncated: MXFP4 ends past the end"):
        gguf_tensor.make_tensor(found.tensors["MXFP4"]).read("MXFP4")


# Headers by hand


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def listed(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + content


def tensor(name: bytes = b"w", shape: tuple[int, ...] = (32, 4), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def made(
    fields: list[bytes] = [],  # noqa: B006
    infos: list[bytes] = [],  # noqa: B006
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    room: int = 4096,
) -> bytes:
    counts = (len(infos), len(fields)) if counts is None else counts
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join([*fields, *infos]) + bytes(room)


HUGE = 1 << 60
HOSTILE = {
    "not a GGUF file": b"GGML" + bytes(100),
    "truncated or not a GGUF file": b"GGU",
    "is of version 1;": made(version=1),
    "is big-endian;": made(version=3 << 24),
    f"has {HUGE} tensors and 0 fields; accepted: 16384 and 4096": made(counts=(HUGE, 0)),
    f"has 0 tensors and {HUGE} fields": made(counts=(0, HUGE)),
    "its header goes on past the end": made(counts=(1000, 1000), room=10),
    f"name of a field has {HUGE} bytes; accepted: up to 1024": made([text(b"", HUGE)]),
    f"a has {HUGE} bytes": made([text(b"a") + struct.pack("<I", 8) + text(b"", HUGE)]),
    "name of a field is not UTF-8": made([text(b"\xff") + struct.pack("<II", 4, 1)]),
    "field a is of the unknown kind 13": made([text(b"a") + struct.pack("<I", 13)]),
    "field a is there twice": made([text(b"a") + struct.pack("<II", 4, 1)] * 2),
    "field a is a list of lists": made([text(b"a") + listed(9, 1, listed(9, 1))]),
    "field a is a list of the unknown kind 77": made([text(b"a") + listed(77, 1)]),
    f"field a has {HUGE} entries; accepted: 1048576 in all": made([text(b"a") + listed(8, HUGE)]),
    "field b has 1000000 entries": made(
        [text(b"a") + listed(0, 600000, bytes(600000)), text(b"b") + listed(0, 1000000)]
    ),
    "goes on past the end": made([text(b"a") + listed(8, 1 << 20)]),
    "past the end": made([text(b"a") + listed(8, 2, text(b"", HUGE))]),
    "header goes on past": made([text(b"a") + listed(10, 1 << 20)]),
    "tensor w has 5 dimensions": made(infos=[tensor(shape=(1,) * 5)]),
    "tensor w has 0 dimensions": made(infos=[tensor(shape=())]),
    "tensor w has shape": made(infos=[tensor(shape=(1 << 40, 1 << 40))]),
    "tensor w has shape [0, 4]": made(infos=[tensor(shape=(4, 0))]),
    "tensor w has type TQ1_0; accepted: F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, Q4_1": made(
        infos=[tensor(kind=34)]
    ),
    "tensor w has type 12345;": made(infos=[tensor(kind=12345)]),
    "tensor w has rows of 33, which are no whole blocks of Q8_0": made(infos=[tensor(shape=(33, 1), kind=8)]),
    "w ends past the end of the file": made(infos=[tensor(offset=1 << 20)]),
    "w ends past": made(infos=[tensor(offset=(1 << 64) - 32)]),
    "w is not aligned to 32 bytes": made(infos=[tensor(offset=8)]),
    "the bytes of w and v overlap": made(infos=[tensor(), tensor(b"v", offset=32)]),
    "tensor w is there twice": made(infos=[tensor(), tensor(offset=512)]),
    "general.alignment is not a power of two": made([text(b"general.alignment") + struct.pack("<II", 4, 0)]),
    "general.alignment is not a power": made([text(b"general.alignment") + struct.pack("<II", 4, 48)]),
    "general.alignment is not": made([text(b"general.alignment") + struct.pack("<I", 8) + text(b"x")]),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_hostile_headers_are_refused_in_one_line_and_cost_no_more_than_they_are_long(
    message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(HOSTILE[message])
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as found:
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message in str(found.value)
    assert "\n" not in str(found.value)
    assert str(found.value).startswith(str(path))
    assert peak < 3 * len(HOSTILE[message]) + (1 << 17)


def test_a_header_is_no_longer_than_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 1000)
    path = tmp_path / "a.gguf"
    path.write_bytes(made([text(b"a") + listed(0, 2000, bytes(2000))]))
    with pytest.raises(CheckpointError, match="a header of more than"):
        read_header(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(Path("/dev/zero"))
    with pytest.raises(CheckpointError, match=r"none\.gguf is missing"):
        read_header(tmp_path / "none.gguf")


PLAIN = made(
    [
        text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
        text(b"t") + listed(8, 2, text(b"ab") + text(b"")),
        text(b"n") + listed(5, 3, bytes(12)),
        text(b"b") + struct.pack("<IB", 7, 1),
        text(b"f") + struct.pack("<If", 6, 1e-6),
    ],
    [tensor(), tensor(b"v", (32,), 8, 512), tensor(b"u", (256, 2), 12, 576)],
)


@settings(max_examples=count_examples(400), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 260), st.integers(0, 255)), max_size=8), st.integers(0, len(PLAIN)))
def test_whatever_is_in_a_header_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(PLAIN)
    for at, byte in changes:
        data[at] = byte
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(data[: length if length % 3 else None])
    try:
        found = read_header(path)
        for name, value in found.fields.items():
            if isinstance(value, ListField):
                found.read_texts(name) if value.kind == 8 else found.read_integers(name)
    except CheckpointError as error:
        assert str(error).startswith(str(path))  # noqa: PT017
        return
    assert all(stored.stop <= path.stat().st_size for stored in found.tensors.values())


def test_an_untouched_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(PLAIN)
    found = read_header(path)
    assert list(found.tensors) == ["w", "v", "u"]
    assert found.tensors["u"].shape == (2, 256)
    assert found.read_texts("t") == ["ab", ""]
    assert found.fields["b"] is True
