"""Weights that come to a device ahead of whoever asks for them are those that reading one after the other gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.finite_check import defer_finite_checks
from adapters.checkpoint.safetensors_folder import TensorEntry, read_header
from adapters.checkpoint.upload import Upload, file_range

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]
SHAPES = {"model.a": (3, 100), "model.b": (1000,), "model.c": (7, 33), "model.d": (1,), "model.empty": (0, 4)}
DTYPES = {"model.b": torch.float32, "model.c": torch.float16}


class Host:
    """Reads one tensor after the other, and remembers which."""

    def __init__(self, tensors: dict[str, TensorEntry]) -> None:
        self.tensors, self.asked = tensors, list[str]()

    def read(self, name: str) -> torch.Tensor:
        self.asked.append(name)
        return self.tensors[name].read(name)


def written(folder: Path) -> Host:
    drawn = {name: torch.randn(shape).to(DTYPES.get(name, torch.bfloat16)) for name, shape in SHAPES.items()}
    save_file(drawn, folder / "model.safetensors")
    return Host(read_header(folder / "model.safetensors"))


def upload(source: Host, device: str, heard: Callable[[], object] = lambda: None, ahead: int = 1000) -> Upload:
    """Through pieces of 64 bytes, so that most tensors are in several, two at once."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def buffer() -> torch.Tensor:
        return torch.empty(64, dtype=torch.uint8, pin_memory=device == "cuda")

    sizes = {"max_pending_bytes": ahead, "piece_bytes": 64, "readers": 2}
    return Upload(source, source.tensors, list(SHAPES), torch.device(device), buffer, on_tensor_read=heard, **sizes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [1, 1000, 1 << 20])
@pytest.mark.parametrize("order", [list(SHAPES), [*reversed(SHAPES), "model.a"]], ids=["named", "another"])
def test_every_tensor_is_the_one_in_the_file(tmp_path: Path, device: str, ahead: int, order: list[str]) -> None:
    source, heard = written(tmp_path), list[int]()
    weights = upload(source, device, lambda: heard.append(1), ahead)
    try:
        with torch.inference_mode():
            for name in order:
                found = weights.read(name)
                assert found.device.type == device
                assert found.dtype == source.tensors[name].dtype
                assert torch.equal(found.cpu(), source.tensors[name].read(name))
    finally:
        weights.close()
    assert len(heard) == len(order)
    assert not source.asked, "nothing is read whole on the host"


def test_what_is_packed_is_read_as_it_is_asked_for(tmp_path: Path) -> None:
    source = written(tmp_path)
    whole = dict(source.tensors)
    weights = upload(source, "cpu")
    weights.tensors = {name: entry for name, entry in whole.items() if name != "model.b"}
    try:
        assert torch.equal(weights.read("model.b"), whole["model.b"].read("model.b"))
    finally:
        weights.close()
    assert source.asked == ["model.b"]


def test_a_file_that_shrank_is_an_error_with_its_name(tmp_path: Path) -> None:
    source = written(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-300])
    last = max(source.tensors, key=lambda name: source.tensors[name].stop)
    weights = upload(source, "cpu")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: truncated: {last} ends past the end"):
        weights.read(last)
    weights.close()


def test_a_file_that_is_gone_is_an_error_with_its_name(tmp_path: Path) -> None:
    source = written(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    weights = upload(source, "cpu")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: No such file"):
        weights.read("model.a")
    weights.close()


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_that_are_none_are_refused(tmp_path: Path, device: str) -> None:
    save_file({"model.a": torch.tensor([1.0, float("nan"), 2.0])}, tmp_path / "model.safetensors")
    weights = upload(Host(read_header(tmp_path / "model.safetensors")), device)
    try:
        with pytest.raises(CheckpointError, match=r"model\.a has values that are no numbers, or infinite"):
            weights.read("model.a")
    finally:
        weights.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), None])
def test_numbers_that_are_none_can_be_told_of_many_tensors_at_once(
    tmp_path: Path, device: str, bad: float | None
) -> None:
    odd = torch.tensor([1.0, 2.0 if bad is None else bad], dtype=torch.bfloat16)
    stored = {"model.a": torch.ones(3), "model.b": odd, "model.c": odd[:0], "model.d": torch.zeros(2)}
    save_file(stored, tmp_path / "model.safetensors")
    source = Host(read_header(tmp_path / "model.safetensors"))
    weights = upload(source, device)
    refused = pytest.raises(CheckpointError, match=r"safetensors: model\.b has values that are no numbers, or infinite")
    try:
        with nullcontext() if bad is None else refused, defer_finite_checks():
            for name, tensor in stored.items():
                read = weights.read(name)
                assert torch.equal(read.cpu(), tensor) == (name != "model.b" or bad == bad)  # noqa: PLR0124 - NaN
                read.zero_()  # it was looked at when it was read
        with pytest.raises(KeyError, match=r"model\.e"), defer_finite_checks():
            weights.read("model.b").add_(source.tensors["model.e"])
    finally:
        weights.close()


def test_no_more_is_on_its_way_than_it_may_be(tmp_path: Path) -> None:
    source = written(tmp_path)
    weights = upload(source, "cpu", ahead=1)
    try:
        weights.read("model.a")
        assert list(weights._pending) == [file_range(source.tensors["model.b"])]  # noqa: SLF001
    finally:
        weights.close()


@pytest.mark.parametrize("device", DEVICES)
def test_what_has_begun_before_anybody_asked_is_the_same(tmp_path: Path, device: str) -> None:
    source = written(tmp_path)
    weights = upload(source, device, ahead=1 << 20)
    try:
        weights.start()
        for name in SHAPES:
            assert torch.equal(weights.read(name).cpu(), source.tensors[name].read(name))
    finally:
        weights.close()


def test_what_could_not_begin_is_told_whoever_asks_for_it(tmp_path: Path) -> None:
    source = written(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    weights = upload(source, "cpu", ahead=1 << 20)
    try:
        weights.start()
        with pytest.raises(CheckpointError, match="cannot be read: No such file"):
            weights.read(next(iter(SHAPES)))
    finally:
        weights.close()


def test_nobody_waits_for_what_has_begun_and_is_not_wanted(tmp_path: Path) -> None:
    weights = upload(written(tmp_path), "cpu", ahead=1 << 20)
    weights.start()
    weights.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("weights")]


def test_where_no_buffer_is_found_the_reader_is_told_and_nobody_waits(tmp_path: Path) -> None:
    source, taken = written(tmp_path), list[int]()

    def buffer() -> torch.Tensor:
        taken.append(1)
        if len(taken) > 1:
            raise MemoryError("64 bytes of host memory")
        return torch.empty(64, dtype=torch.uint8)

    sizes = {"max_pending_bytes": 1 << 20, "piece_bytes": 64, "readers": 4}
    weights = Upload(source, source.tensors, list(SHAPES), torch.device("cpu"), buffer, **sizes)

    def again_and_again() -> None:
        with torch.inference_mode():
            for name in (name for _ in range(1000) for name in SHAPES):
                weights.read(name)

    with pytest.raises(MemoryError, match="64 bytes"):
        again_and_again()
    weights.close()


@pytest.mark.cuda
@pytest.mark.parametrize(("served", "is_one"), [(torch.float32, True), (torch.bfloat16, False)])
def test_weights_that_all_come_at_once_and_stay_are_in_one_piece_of_the_device(
    tmp_path: Path, served: torch.dtype, is_one: bool
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    stored = {f"model.{number}": torch.full((3 << 20,), float(number)) for number in range(8)}
    save_file(stored, tmp_path / "model.safetensors")
    tensors, device = read_header(tmp_path / "model.safetensors"), torch.device("cuda", 0)

    def buffer() -> torch.Tensor:
        return torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)

    def find_segments(tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return where the pieces of device memory begin that hold the tensors, as the allocator of torch sees them."""
        return {next(begin for begin, end in list_segments() if begin <= one.data_ptr() < end) for one in tensors}

    def list_segments() -> list[tuple[int, int]]:
        return [(piece["address"], piece["address"] + piece["total_size"]) for piece in torch.cuda.memory_snapshot()]

    torch.cuda.empty_cache()
    earlier = {begin for begin, _ in list_segments()}  # of other tests, which may have room for some of the tensors
    whole = sum(entry.nbytes for entry in tensors.values())
    weights = Upload(
        Host(tensors),
        tensors,
        list(stored),
        device,
        buffer,
        served_dtype=served,
        max_pending_bytes=whole,
        piece_bytes=1 << 20,
    )
    try:
        weights.start()
        read = {name: weights.read(name) for name in stored}
        held = find_segments(read.values())
        assert len(held - earlier) <= 1 if is_one else len(held) > 1
        assert all(bool((read[name] == number).all()) for number, name in enumerate(stored))
    finally:
        weights.close()
