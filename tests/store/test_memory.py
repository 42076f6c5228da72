"""Slabs: what is taken does not overlap, what is given back is taken again, and the limit holds."""

from __future__ import annotations

import random
import re
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import adapters.store.slab_memory
from adapters.sequence_layout import RowSpec, TensorSpec
from adapters.store.files.file_format import Draft, Layout
from adapters.store.open_store import max_run, open_store, slab_size
from adapters.store.slab_memory import ALIGN, SLAB, SOON, Buffer, Memory


def place(buffer) -> tuple[int, int]:
    return buffer.data.data_ptr(), buffer.data.data_ptr() + buffer.data.nbytes


def test_what_is_given_back_is_taken_again() -> None:
    memory = Memory(SLAB)
    first = memory.take(5000)
    assert first.data.nbytes == 5000
    assert first.data.data_ptr() % 64 == 0
    was = place(first)
    del first
    assert place(memory.take(6000))[0] == was[0]
    assert memory.held == SLAB


@pytest.mark.cuda
def test_what_a_gpu_copies_from_is_all_there_before_anybody_waits_for_it() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    memory = Memory(2 * SLAB + 5 * ALIGN, pin=True)
    kept = memory.take(ALIGN)
    memory.busy = lambda: False
    memory.fill()
    assert memory.held == memory.most
    some = [memory.take(SLAB - ALIGN), memory.take(SLAB), memory.take(5 * ALIGN)]
    assert all(one.data.is_pinned() for one in (kept, *some))
    assert not memory.take(ALIGN).data.is_pinned(), "that is from the system"


def test_what_a_gpu_copies_to_is_held_or_refused() -> None:
    memory = Memory(2 * ALIGN, pin=True)
    held = memory.take(2 * ALIGN, held=True)
    with pytest.raises(MemoryError, match="pinned"):
        memory.take(ALIGN, held=True)
    assert memory.take(ALIGN).data.nbytes == ALIGN, "of the system"
    del held
    memory.take(ALIGN, held=True)
    assert Memory(pin=False).take(ALIGN, held=True).data.nbytes == ALIGN, "where nothing is pinned"


def test_who_holds_others_up_has_what_is_there_and_no_more_is_registered_for_it() -> None:
    memory = Memory(4 * SLAB, pin=True)
    with pytest.raises(MemoryError, match=f"0 of {4 * SLAB} are there"):
        memory.take(ALIGN, held=True, more=False)
    assert not memory.held
    first = memory.take(ALIGN, held=True)
    assert memory.take(SLAB - ALIGN, held=True, more=False).data.nbytes == SLAB - ALIGN
    assert memory.held == SLAB
    assert first.data.nbytes == ALIGN
    assert Memory(4 * SLAB).take(ALIGN, held=True, more=False).data.nbytes == ALIGN, "where nothing is pinned"


def test_what_no_gpu_copies_from_is_made_when_it_is_wanted() -> None:
    memory = Memory(2 * SLAB)
    memory.fill()
    assert not memory.held


def test_nothing_more_is_registered_once_it_is_closed() -> None:
    memory = Memory(SOON + 8 * SLAB, pin=True)
    filling = threading.Thread(target=memory.fill)
    filling.start()
    while memory.held < SOON:  # from there on it takes its time
        time.sleep(0.001)
    memory.close()
    filling.join(0.1)
    assert not filling.is_alive()
    there = memory.held
    assert there < memory.most
    memory.fill()
    assert memory.held == there


def test_nothing_waits_while_nobody_is_served() -> None:
    asked, waits, busy = list[int](), list[float](), [False, False, True, False]
    memory = Memory(SOON + 5 * SLAB, pin=True)
    memory.busy = lambda: asked.append(memory.held) or (busy.pop(0) if busy else False)
    memory._closing.wait = waits.append  # type: ignore[assignment] # noqa: SLF001
    memory.fill()
    assert memory.held == memory.most
    assert asked == [SOON + number * SLAB for number in range(6)]
    assert len(waits) == 1


@pytest.mark.parametrize("layers", [0, 1, 5, 8])
@pytest.mark.parametrize("state", [0, 1000, 51_511_296])
def test_slabs_hold_whole_runs_and_positional_state(state: int, layers: int) -> None:
    """A full pool has a place for each of them, a draft's too, and little of it is left over."""
    kept = (TensorSpec("conv", "I8", (state,)),) if state else ()
    draft = Draft("draft", RowSpec(("k", "v") * layers, 8, 128, "BF16")) if layers else None
    layout = Layout("model", 64, RowSpec(("k", "v") * 36, 8, 128, "BF16"), draft, kept)
    state = layout.size("state", 0)
    slab, run = slab_size(layout, 32 << 20), max_run(layout, 32 << 20)
    memory = Memory(16 * slab, pin=True, slab=slab)
    memory.fill()
    held = [memory.take(size, held=True, more=False) for size in [state] * bool(state) + [run] * (15 * slab // run)]
    assert sum(one.data.nbytes for one in held) > 0.9 * 15 * slab
    assert memory.held == memory.most
    held.clear()
    path = tuple(range(1, 5000))
    store = open_store(layout, None, host_bytes=1 << 30, memory=memory)
    assert store is not None
    for kind in ("rows", "draft") if layers else ("rows",):
        for run in store.gaps(path, kind):
            assert memory.take(layout.size(run.kind, run.length), held=True, more=False).data.nbytes


def test_whoever_waits_for_memory_takes_what_another_one_made() -> None:
    """Three who are there at once, of a pool of one slab."""
    memory, found = Memory(SLAB, pin=True), list[Buffer]()

    def take() -> None:
        found.append(memory.take(ALIGN, held=True))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert memory.held == SLAB


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_what_could_not_be_made_is_not_counted(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(4 * SLAB, pin=True)

    def failing(size: int, *, aside: bool) -> torch.Tensor:
        raise error(f"no {size} bytes, {aside}")

    with monkeypatch.context() as patched:
        patched.setattr(adapters.store.slab_memory, "allocate_pinned", failing)
        for _ in range(5):
            with pytest.raises(error):
                memory.take(SLAB, held=True)
    assert not memory.held
    assert memory.take(SLAB, held=True).data.nbytes == SLAB


def test_one_slab_is_registered_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever maps memory keeps the interpreter, and the system lets nobody do so while another one is registered."""
    under_way, most, real = [0], [0], adapters.store.slab_memory.allocate_pinned

    def slowly(size: int, *, aside: bool) -> torch.Tensor:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        time.sleep(0.002)
        under_way[0] -= 1
        assert aside, "others are served"
        return real(size, aside=aside)

    monkeypatch.setattr(adapters.store.slab_memory, "allocate_pinned", slowly)
    memory, held = Memory(16 * SLAB, pin=True), list[Buffer]()
    memory.busy = lambda: False
    filling = threading.Thread(target=memory.fill)
    filling.start()
    held += [memory.take(SLAB, held=True) for _ in range(8)]
    filling.join(30)
    assert memory.held == memory.most
    assert most == [1]


def test_a_view_does_not_keep_it_but_the_buffer_does() -> None:
    memory = Memory(SLAB)
    one, other = memory.take(ALIGN), memory.take(ALIGN)
    one.data.fill_(1)
    other.data.fill_(2)
    assert one.data.sum() == ALIGN
    del other
    memory.take(ALIGN).data.fill_(3)
    assert one.data.sum() == ALIGN


@pytest.mark.parametrize("seed", range(5))
def test_no_two_overlap(seed: int) -> None:
    draw, memory, held = random.Random(seed), Memory(3 << 20), []
    for _ in range(400):
        if held and draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
        else:
            held.append(memory.take(draw.randint(1, 1 << draw.randint(4, 20))))
        assert memory.held <= 3 << 20
        spans = sorted(map(place, held))
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    held.clear()
    whole = memory.take(memory.held)
    assert whole.data.nbytes == memory.held == 3 << 20, "all of it is in one piece again"


def test_beyond_the_limit_memory_comes_from_the_system() -> None:
    memory = Memory(1 << 20)
    held = [memory.take(600_000) for _ in range(4)]
    assert memory.held <= 1 << 20
    assert len({place(buffer)[0] for buffer in held}) == 4
    assert Memory().take(10).data.nbytes == 10, "no slabs at all"


def test_more_than_there_is_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        Memory(1 << 62).take(1 << 61)
    Memory(1 << 62).prepare(1 << 61, 1)


def test_what_is_being_prepared_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start prepares memory while somebody may take some already."""
    memory, numpy, spans, others = Memory(SLAB), torch.Tensor.numpy, list[tuple[int, int]](), list[Buffer]()

    def about_to_be_filled(data: torch.Tensor) -> object:
        spans.append((data.data_ptr(), data.data_ptr() + data.nbytes))
        others.append(memory.take(ALIGN))
        spans.append(place(others[-1]))
        return numpy(data)

    monkeypatch.setattr(torch.Tensor, "numpy", about_to_be_filled)
    memory.prepare(ALIGN, 3)
    ordered = sorted(spans)
    assert len(ordered) == 6
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ordered))


def test_what_is_there_already_is_prepared_first() -> None:
    """Weights have come through some of it: to register more takes longer than all else."""
    memory = Memory(4 * SLAB)
    there = [memory.take(SLAB // 2) for _ in range(3)]
    assert memory.held == 2 * SLAB
    there.clear()
    memory.prepare(SLAB // 2, 6)
    assert memory.held == 3 * SLAB


def test_threads_may_take_and_give_back_at_once() -> None:
    memory, odd = Memory(8 << 20), list[int]()

    def work(number: int) -> None:
        for _ in range(200):
            buffer = memory.take(40_000)
            buffer.data.fill_(number)
            if not bool((buffer.data == number).all()):
                odd.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not odd
    assert memory.held <= 8 << 20


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="Linux with large pages")
def test_large_pages_are_asked_for_and_memory_goes_back() -> None:
    """A page at a time, mapping what a start prepares took five times as long."""
    memory = Memory(SLAB)
    address = memory.take(SLAB // 2).data.data_ptr()

    def advised() -> bool:
        found, inside = "", False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(place[1], 16) <= address < int(place[2], 16)
            elif inside and line.startswith("VmFlags:"):
                found = line
        return " hg" in found

    assert advised()
    del memory
    assert not advised()
