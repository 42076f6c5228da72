"""Tests that packed weights which are sent to a device early are those that are made on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix
from adapters.checkpoint.upload import Upload
from adapters.models.open_checkpoint import Checkpoint
from tests.models.checkpoints import save_model
from tests.models.gguf.test_gguf_models import WIDE_FAMILIES
from tests.models.ggufs import packed, random_blocks, write_gguf
from tests.models.kernels.test_upload import DEVICES
from tests.models.quantised import FORMATS, quantise
from tests.pairs import one_in

KINDS = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.F16, Kind.BF16)
EXACT = {Kind.Q8_0, Kind.Q4_0, Kind.F16, Kind.BF16}  # which the package makes
FILES = [("llama", kind) for kind in KINDS]
FILES += [("qwen3_5_text", Kind.Q8_0), ("qwen3_5_text", Kind.Q4_K), ("qwen3_moe", Kind.Q4_K)]


@contextmanager
def uploading(checkpoint: Checkpoint, device: str) -> Iterator[Upload]:
    """Through pieces of 4 kB, two at once, and some tensors ahead."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def buffer() -> torch.Tensor:
        return torch.empty(4096, dtype=torch.uint8, pin_memory=device == "cuda")

    names = [*checkpoint.tensors]
    sizes = {"max_pending_bytes": 1 << 17, "piece_bytes": 4096, "readers": 2}
    weights = Upload(checkpoint, checkpoint.tensors, names, torch.device(device), buffer, **sizes)
    try:
        yield weights
    finally:
        weights.close()


def same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    ours, theirs = (one.cpu().contiguous().view(torch.uint8) for one in (found, expected))
    return alike and torch.equal(ours, theirs)


def alike(found: PackedMatrix, expected: PackedMatrix) -> bool:
    pairs = zip(found.tensors, expected.tensors, strict=True)
    return found.layout == expected.layout and all(same(*pair) for pair in pairs)


def compare(checkpoint: Checkpoint, device: str) -> None:
    """All tensors, in the order in which they were named; the packed ones as they are packed, and unpacked."""
    with torch.inference_mode(), uploading(checkpoint, device) as weights:
        for name, entry in checkpoint.tensors.items():
            if weights.find_layout(name) is not None:
                matrix = weights.read_packed(name)
                assert matrix.steps.device.type == device, name
                assert alike(matrix, checkpoint.read_packed(name)), name
            found = weights.read(name)
            assert same(found, entry.read(name)), name
            assert found.device.type == (device if entry.sources else "cpu"), name
        assert not weights._pending  # noqa: SLF001


@one_in(3, "family")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "kind"), FILES, ids=lambda one: getattr(one, "name", one))
def test_tensors_of_a_file_are_made_where_they_come_to(family: str, kind: Kind, device: str, tmp_path: Path) -> None:
    save_model(tmp_path / "m", family, **WIDE_FAMILIES[family])
    pack = packed if kind in EXACT else random_blocks
    checkpoint = Checkpoint.open(write_gguf(tmp_path / "m.gguf", tmp_path / "m", kind, pack=pack))
    assert bool(checkpoint.layouts) == (kind not in {Kind.F16, Kind.BF16})
    compare(checkpoint.with_dtype(torch.bfloat16), device)


@one_in(3, "name")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
def test_tensors_of_a_packed_folder_are_made_where_they_come_to(name: str, device: str, tmp_path: Path) -> None:
    save_model(tmp_path / "m", "qwen3", **WIDE_FAMILIES["qwen3"])
    quantise(tmp_path / "m", tmp_path / "packed", name)
    compare(Checkpoint.open(tmp_path / "packed").with_dtype(torch.bfloat16), device)


def test_what_finds_no_room_is_made_on_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_model(tmp_path / "m", "qwen3", **WIDE_FAMILIES["qwen3"])
    checkpoint = Checkpoint.open(write_gguf(tmp_path / "m.gguf", tmp_path / "m", Kind.Q4_K, pack=random_blocks))
    name = "model.layers.1.mlp.up_proj.weight"

    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError

    with uploading(checkpoint, "cpu") as weights:
        monkeypatch.setattr(Upload, "_fetch", full)
        assert same(weights.read(name), checkpoint.read(name))
        assert alike(weights.read_packed(name), checkpoint.read_packed(name))
        norm = "model.norm.weight"  # F32, which no more room would help
        assert same(weights.read(norm), checkpoint.read(norm))
