"""Slabs: what is taken does not overlap, what is given back is taken again, and the limit holds."""

from __future__ import annotations

import random
import re
import threading
import time
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

import adapters.store.slab_memory
from adapters.sequence_layout import RowSpec, TensorSpec
from adapters.store.files.file_format import DraftLayout, Layout
from adapters.store.open_store import choose_slab_bytes, compute_longest_run, open_store
from adapters.store.slab_memory import ALIGN, EAGER_BYTES, MAX_PAUSE_S, SLAB_BYTES, Buffer, SlabMemory
from effects.ids import ENGINE
from effects.pacing import PaceMemory


def place(buffer) -> tuple[int, int]:
    return buffer.data.data_ptr(), buffer.data.data_ptr() + buffer.data.nbytes


def test_what_is_given_back_is_taken_again() -> None:
    memory = SlabMemory(SLAB_BYTES)
    first = memory.allocate(5000)
    assert first.data.nbytes == 5000
    assert first.data.data_ptr() % 64 == 0
    was = place(first)
    del first
    assert place(memory.allocate(6000))[0] == was[0]
    assert memory.slab_bytes == SLAB_BYTES


def test_the_last_of_several_is_taken_first() -> None:
    """It is still in the processor's cache. A buffer of another size gets what all of them together leave."""
    memory = SlabMemory(3 * ALIGN, slab=3 * ALIGN)
    held = [memory.allocate(ALIGN - 1) for _ in range(3)]
    places = [place(buffer) for buffer in held]
    for number in (1, 0, 2):
        held[number] = None
    assert [place(memory.allocate(ALIGN - 1)) for _ in range(2)] == [places[2], places[2]]
    again = [memory.allocate(ALIGN - 1) for _ in range(3)]
    assert [place(buffer) for buffer in again] == [places[2], places[0], places[1]]
    del again
    assert memory.allocate(3 * ALIGN).data.nbytes == memory.slab_bytes == 3 * ALIGN


@pytest.mark.cuda
def test_what_a_gpu_copies_from_is_all_there_before_anybody_waits_for_it() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    memory = SlabMemory(2 * SLAB_BYTES + 5 * ALIGN, pin=True)
    kept = memory.allocate(ALIGN)
    memory.set_pace(ENGINE, PaceMemory(gently=False))
    memory.register_all()
    assert memory.slab_bytes == memory.max_bytes
    some = [memory.allocate(SLAB_BYTES - ALIGN), memory.allocate(SLAB_BYTES), memory.allocate(5 * ALIGN)]
    assert all(one.data.is_pinned() for one in (kept, *some))
    assert not memory.allocate(ALIGN).data.is_pinned(), "that is from the system"


def test_what_a_gpu_copies_to_is_held_or_refused() -> None:
    memory = SlabMemory(2 * ALIGN, pin=True)
    held = memory.allocate(2 * ALIGN, pinned_only=True)
    with pytest.raises(MemoryError, match="pinned"):
        memory.allocate(ALIGN, pinned_only=True)
    assert memory.allocate(ALIGN).data.nbytes == ALIGN, "of the system"
    del held
    memory.allocate(ALIGN, pinned_only=True)
    assert SlabMemory(pin=False).allocate(ALIGN, pinned_only=True).data.nbytes == ALIGN, "where nothing is pinned"


def test_who_holds_others_up_has_what_is_there_and_no_more_is_registered_for_it() -> None:
    memory = SlabMemory(4 * SLAB_BYTES, pin=True)
    with pytest.raises(MemoryError, match=f"0 of {4 * SLAB_BYTES} are there"):
        memory.allocate(ALIGN, pinned_only=True, may_grow=False)
    assert not memory.slab_bytes
    first = memory.allocate(ALIGN, pinned_only=True)
    assert memory.allocate(SLAB_BYTES - ALIGN, pinned_only=True, may_grow=False).data.nbytes == SLAB_BYTES - ALIGN
    assert memory.slab_bytes == SLAB_BYTES
    assert first.data.nbytes == ALIGN
    assert SlabMemory(4 * SLAB_BYTES).allocate(ALIGN, pinned_only=True, may_grow=False).data.nbytes == ALIGN, (
        "where nothing is pinned"
    )


def test_what_no_gpu_copies_from_is_made_when_it_is_wanted() -> None:
    memory = SlabMemory(2 * SLAB_BYTES)
    memory.register_all()
    assert not memory.slab_bytes


def test_nothing_more_is_registered_once_it_is_closed() -> None:
    memory = SlabMemory(EAGER_BYTES + 8 * SLAB_BYTES, pin=True)
    pausing = threading.Event()
    wait_until_closed = memory._closing.wait  # noqa: SLF001

    def wait(_: float) -> None:  # the first pause lasts until the memory is closed
        pausing.set()
        assert wait_until_closed(30)

    memory._closing.wait = wait  # type: ignore[assignment] # noqa: SLF001
    filling = threading.Thread(target=memory.register_all)
    filling.start()
    assert pausing.wait(30)
    memory.close()
    filling.join(30)
    assert not filling.is_alive()
    assert memory.slab_bytes == EAGER_BYTES
    memory.register_all()
    assert memory.slab_bytes == EAGER_BYTES


def test_slabs_are_registered_with_pauses_only_while_requests_are_served() -> None:
    waits = list[int]()
    memory = SlabMemory(EAGER_BYTES + 5 * SLAB_BYTES, pin=True)
    memory.set_pace(ENGINE, PaceMemory(gently=True))

    def wait(seconds: float) -> None:
        assert 0 < seconds <= MAX_PAUSE_S
        waits.append(memory.slab_bytes)
        memory.set_pace(ENGINE, PaceMemory(gently=len(waits) < 2))

    memory._closing.wait = wait  # type: ignore[assignment] # noqa: SLF001
    memory.register_all()
    assert memory.slab_bytes == memory.max_bytes
    assert waits == [EAGER_BYTES, EAGER_BYTES + SLAB_BYTES]


def test_a_thread_is_woken_when_memory_comes_free_wherever_that_happens() -> None:
    """No thread polls: whatever releases a buffer or makes a slab notifies."""
    memory, news = SlabMemory(ALIGN, pin=True), SimpleQueue[None]()
    first = memory.allocate(ALIGN, pinned_only=True)
    with memory.notify(news):
        assert news.empty()
        held = [first]
        del first
        letting_go = threading.Thread(target=held.clear)
        letting_go.start()
        letting_go.join()
        news.get(timeout=20)
        assert memory.allocate(ALIGN, pinned_only=True).data.nbytes == ALIGN
    assert news.get(timeout=20) is None
    memory.wake_waiters()
    assert news.empty(), "it is not awaited any more"


def test_a_thread_that_waits_for_memory_does_not_wake_itself() -> None:
    """An attempt that finds all slabs in use tells nobody that memory may have come free."""
    memory, news = SlabMemory(2 * ALIGN, pin=True), SimpleQueue[None]()
    held = memory.allocate(2 * ALIGN, pinned_only=True)
    with memory.notify(news):
        for _ in range(3):
            with pytest.raises(MemoryError):
                memory.allocate(ALIGN, pinned_only=True, may_grow=True)
        assert news.empty()
        del held
        assert news.get(timeout=20) is None


@pytest.mark.parametrize("layers", [0, 1, 5, 8])
@pytest.mark.parametrize("state", [0, 1000, 51_511_296])
def test_slabs_hold_whole_runs_and_positional_state(state: int, layers: int) -> None:
    """A full pool has a place for each of them, a draft's too, and little of it is left over."""
    kept = (TensorSpec("conv", "I8", (state,)),) if state else ()
    draft = DraftLayout("draft", RowSpec(("k", "v") * layers, 8, 128, "BF16")) if layers else None
    layout = Layout("model", 64, RowSpec(("k", "v") * 36, 8, 128, "BF16"), draft, kept)
    state = layout.compute_size("state", 0)
    slab, run = choose_slab_bytes(layout, 32 << 20), compute_longest_run(layout, 32 << 20)
    memory = SlabMemory(16 * slab, pin=True, slab=slab)
    memory.register_all()
    held = [
        memory.allocate(size, pinned_only=True, may_grow=False)
        for size in [state] * bool(state) + [run] * (15 * slab // run)
    ]
    assert sum(one.data.nbytes for one in held) > 0.9 * 15 * slab
    assert memory.slab_bytes == memory.max_bytes
    held.clear()
    path = tuple(range(1, 5000))
    store = open_store(layout, None, host_bytes=1 << 30, memory=memory)
    assert store is not None
    for kind in ("rows", "draft") if layers else ("rows",):
        for run in store.find_missing_runs(path, kind):
            assert memory.allocate(
                layout.compute_size(run.kind, run.length), pinned_only=True, may_grow=False
            ).data.nbytes


def test_whoever_waits_for_memory_takes_what_another_one_made() -> None:
    """Three who are there at once, of a pool of one slab."""
    memory, found = SlabMemory(SLAB_BYTES, pin=True), list[Buffer]()

    def take() -> None:
        found.append(memory.allocate(ALIGN, pinned_only=True))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert memory.slab_bytes == SLAB_BYTES


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_what_could_not_be_made_is_not_counted(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SlabMemory(4 * SLAB_BYTES, pin=True)

    def failing(size: int, *, aside: bool) -> torch.Tensor:
        raise error(f"no {size} bytes, {aside}")

    with monkeypatch.context() as patched:
        patched.setattr(adapters.store.slab_memory, "allocate_pinned", failing)
        for _ in range(5):
            with pytest.raises(error):
                memory.allocate(SLAB_BYTES, pinned_only=True)
    assert not memory.slab_bytes
    assert memory.allocate(SLAB_BYTES, pinned_only=True).data.nbytes == SLAB_BYTES


def test_one_slab_is_registered_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that maps memory keeps the interpreter, and the system lets no thread map while another one registers
    memory.
    """
    under_way, most, real = [0], [0], adapters.store.slab_memory.allocate_pinned

    def slowly(size: int, *, aside: bool) -> torch.Tensor:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        time.sleep(0.002)
        under_way[0] -= 1
        assert aside, "others are served"
        return real(size, aside=aside)

    monkeypatch.setattr(adapters.store.slab_memory, "allocate_pinned", slowly)
    memory, held = SlabMemory(16 * SLAB_BYTES, pin=True), list[Buffer]()
    memory.set_pace(ENGINE, PaceMemory(gently=False))
    filling = threading.Thread(target=memory.register_all)
    filling.start()
    held += [memory.allocate(SLAB_BYTES, pinned_only=True) for _ in range(8)]
    filling.join(30)
    assert memory.slab_bytes == memory.max_bytes
    assert most == [1]


def test_a_view_does_not_keep_it_but_the_buffer_does() -> None:
    memory = SlabMemory(SLAB_BYTES)
    one, other = memory.allocate(ALIGN), memory.allocate(ALIGN)
    one.data.fill_(1)
    other.data.fill_(2)
    assert one.data.sum() == ALIGN
    del other
    memory.allocate(ALIGN).data.fill_(3)
    assert one.data.sum() == ALIGN


@pytest.mark.parametrize("seed", range(5))
def test_no_two_overlap(seed: int) -> None:
    draw, memory, held = random.Random(seed), SlabMemory(3 << 20), []
    for _ in range(400):
        if held and draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
        else:
            held.append(memory.allocate(draw.randint(1, 1 << draw.randint(4, 20))))
        assert memory.slab_bytes <= 3 << 20
        spans = sorted(map(place, held))
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    held.clear()
    whole = memory.allocate(memory.slab_bytes)
    assert whole.data.nbytes == memory.slab_bytes == 3 << 20, "all of it is in one piece again"


def test_beyond_the_limit_memory_comes_from_the_system() -> None:
    memory = SlabMemory(1 << 20)
    held = [memory.allocate(600_000) for _ in range(4)]
    assert memory.slab_bytes <= 1 << 20
    assert len({place(buffer)[0] for buffer in held}) == 4
    assert SlabMemory().allocate(10).data.nbytes == 10, "no slabs at all"


def test_more_than_there_is_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        SlabMemory(1 << 62).allocate(1 << 61)
    SlabMemory(1 << 62).map_buffers(1 << 61, 1)


def test_what_is_being_prepared_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start prepares memory while other parts may take some already."""
    memory, numpy, spans, others = SlabMemory(SLAB_BYTES), torch.Tensor.numpy, list[tuple[int, int]](), list[Buffer]()

    def about_to_be_filled(data: torch.Tensor) -> object:
        spans.append((data.data_ptr(), data.data_ptr() + data.nbytes))
        others.append(memory.allocate(ALIGN))
        spans.append(place(others[-1]))
        return numpy(data)

    monkeypatch.setattr(torch.Tensor, "numpy", about_to_be_filled)
    memory.map_buffers(ALIGN, 3)
    ordered = sorted(spans)
    assert len(ordered) == 6
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ordered))


def test_what_is_there_already_is_prepared_first() -> None:
    """Weights have come through some of it: to register more takes longer than all else."""
    memory = SlabMemory(4 * SLAB_BYTES)
    there = [memory.allocate(SLAB_BYTES // 2) for _ in range(3)]
    assert memory.slab_bytes == 2 * SLAB_BYTES
    there.clear()
    memory.map_buffers(SLAB_BYTES // 2, 6)
    assert memory.slab_bytes == 3 * SLAB_BYTES


def test_threads_may_take_and_give_back_at_once() -> None:
    memory, odd = SlabMemory(8 << 20), list[int]()

    def work(number: int) -> None:
        for _ in range(200):
            buffer = memory.allocate(40_000)
            buffer.data.fill_(number)
            if not bool((buffer.data == number).all()):
                odd.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not odd
    assert memory.slab_bytes <= 8 << 20


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="Linux with large pages")
def test_large_pages_are_asked_for_and_memory_goes_back() -> None:
    """A page at a time, mapping what a start prepares took five times as long."""
    memory = SlabMemory(SLAB_BYTES)
    address = memory.allocate(SLAB_BYTES // 2).data.data_ptr()

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
