"""The store under kills, failing disks, power cuts and damaged files: what it gives back is right, or nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from adapters.metrics import Metrics
from adapters.store import index_journal, recent_prompts
from adapters.store.disk.file_names import QUARANTINE, classify_name
from adapters.store.file_description import make_named_entry, read_head
from adapters.store.files.file_format import Layout, parse_name
from adapters.store.files.private_folder import FolderUnusable
from adapters.store.files.seekable import Damaged
from adapters.store.recent_prompts import RecentPrompts
from adapters.store.store import Store
from effects.ids import Tokens
from engine.__main__ import main
from tests.campaign.case import UNCOUNTED, Case, quiet
from tests.campaign.damage import harm
from tests.campaign.faults import Unreliable, short_reads
from tests.importing import importing
from tests.store.kit import EVERYTHING, FULL, LAYOUT, OTHER, at_work, checkpoint, disk_store, kept, save, settled

LAYOUTS = (LAYOUT, FULL, EVERYTHING)
ROOT = Path(__file__).parents[2]


def prompts(random: Random, count: int = 6) -> list[Tokens]:
    """Some begin as others do."""
    made = [tuple(random.randrange(1, 5000) for _ in range(random.randint(8, 60)))]
    while len(made) < count:
        before = random.choice(made)
        shared = before[: random.randint(0, len(before))]
        made.append((*shared, *(random.randrange(1, 5000) for _ in range(random.randint(4, 40)))))
    return made


def keep(store: Store, tokens: Tokens) -> None:
    """Everything that the layout keeps of it."""
    save(store, tokens)
    whole = tokens[: len(tokens) // store.layout.block_size * store.layout.block_size]
    if store.layout.draft is not None:
        save(store, tokens, "draft")
    if store.layout.state and whole:
        checkpoint(store, whole)


def found(store: Store, tokens: Tokens) -> int:
    """Return how many tokens of the sequence the store has. All rows are compared with the true ones. Damage on the way
    is a miss, and is met once.
    """
    for _ in range(100):
        with suppress(Damaged, OSError):
            return kept(store, tokens)
    raise AssertionError("damaged files are found again and again")


def counted(store: Store) -> dict[str, float]:
    """Return what /metrics shows of the cache."""
    metrics = Metrics()
    metrics.watch_cache(store.collect_figures)
    metrics.watch_damage(lambda: store.damaged_files)
    lines = metrics.render()[0].decode().splitlines()
    named = ("rekindle_cache", "rekindle_damaged")
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(named)}


def damaged(store: Store, kind: str) -> float:
    """Return how many damaged files of this kind /metrics shows."""
    return counted(store)[f'rekindle_damaged_files_total{{what="{kind}"}}']


def unfit(file: Path, layout: Layout) -> str | None:
    """Return the kind of damage that a start with this layout will find in a file, of those that it reads whole; None
    for none.
    """
    if not file.is_file() or file.is_symlink():
        return None
    readable = file.stat().st_size < recent_prompts.MAX_FILE_BYTES
    if file.name == index_journal.NAME:
        return None if readable and index_journal.parse_journal(file.read_bytes()).whole else "journal"
    if file.name == "recent-" + layout.compute_root("rows").hex():
        return None if readable and recent_prompts.restore_prompts(file.read_bytes(), RecentPrompts()) else "recent"
    return None


def sound(store: Store) -> None:
    """Its thread is alive and had no trouble, and nothing is held."""
    assert store.lower_tiers
    assert not store.lower_tiers[0].writer.trouble, store.lower_tiers[0].writer.trouble
    figures = store.collect_figures().build_json()
    assert (figures["leases"], figures["queued_bytes"]) == (0, 0), figures


def works(store: Store, random: Random) -> None:
    """Something new is kept, and found."""
    tokens = tuple(random.randrange(6000, 7000) for _ in range(24))
    keep(store, tokens)
    settled(store)
    assert found(store, tokens) == 24
    sound(store)


def run_command(*words: str) -> int:
    """Run a command of ours, check what it prints, and return its exit status."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(list(words))
    quiet(said.getvalue())
    return status


def emptied(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


# --- a disk that fails, and a power cut ---


def tried(store: Store, tokens: Tokens, random: Random) -> None:
    match random.randrange(4):
        case 0:
            store.count_shared_tokens(tokens, 30)
        case 1:
            with suppress(Damaged, OSError):
                kept(store, tokens)
        case _:
            keep(store, tokens)
    if random.random() < 0.3:
        settled(store)


@contextmanager
def faults(path: Path) -> Iterator[Case]:
    at_work()

    def case(random: Random) -> None:
        layout, rate, budget = random.choice(LAYOUTS), random.choice((0, 0, 0.02, 0.2)), random.choice((1 << 30, 9000))
        some = prompts(random)
        if random.random() < 0.5:
            with_some(path / "kv", layout, some[:2])
        opening = Unreliable.opened(random, rate, random.randint(1, 120))
        store = disk_store(path / "kv", layout=layout, folder=opening, disk=budget, host=random.choice((0, 1 << 20)))
        with short_reads(random, rate):
            for _ in range(8):
                tried(store, random.choice(some), random)
            settled(store)
        folder = store.lower_tiers[0].folder  # type: ignore[union-attr]
        assert isinstance(folder, Unreliable)
        assert store.lower_tiers
        assert counted(store)["rekindle_cache_write_errors_total"] >= folder.failed_runs
        sound(store)
        folder.rate = 0
        if budget > 9000:
            works(store, random)
        image = folder.image or folder.cut()
        assert store.close()
        reopened(image.unpack(path / "cut"), layout, some, random, image.promised)
        reopened(path / "kv", layout, some, random, frozenset())
        emptied(path / "kv")
        emptied(path / "cut")

    yield case


def with_some(path: Path, layout: Layout, some: Sequence[Tokens]) -> None:
    store = disk_store(path, layout=layout)
    for tokens in some:
        keep(store, tokens)
        store.count_shared_tokens(tokens, 30)
    settled(store)
    assert store.close()


def reopened(path: Path, layout: Layout, some: Sequence[Tokens], random: Random, promised: frozenset[str]) -> None:
    """After a kill or a power cut: no file is damaged, what was promised is there, and everything goes on.

    Of files that have blocks in common one stays. There are such where a run was written before an older one was known,
    because the journal could not be read, and the power went between the two.
    """
    blocks = blocks_of(path)
    store = disk_store(path, layout=layout)
    settled(store)
    assert store.lower_tiers
    for name in promised:
        if (named := parse_name(name)) and named[0] not in store.lower_tiers[0].index:
            mine, others = blocks.get(name, set()), (keys for other, keys in blocks.items() if other != name)
            assert any(mine & keys for keys in others), f"written for good, and gone: {name}"
    for tokens in some:
        found(store, tokens)
        store.recent_prompts.longest_match(tokens, 5)
    assert counted(store)["rekindle_cache_quarantined_total"] == 0
    works(store, random)
    assert store.close()
    assert not [name for name in os.listdir(path) if classify_name(name) == "temporary"]  # noqa: PTH208
    assert run_command("cache", "verify", str(path)) == 0


def blocks_of(path: Path) -> dict[str, frozenset[bytes]]:
    """The keys of the blocks in each run's file there, as it says itself."""
    found = dict[str, frozenset[bytes]]()
    for file in path.iterdir():
        if (named := parse_name(file.name)) is not None:
            with suppress(Damaged), file.open("rb") as opened:
                size = file.stat().st_size
                found[file.name] = frozenset(make_named_entry(named, read_head(opened.fileno(), size), size).keys)
    return found


# --- kills ---


@contextmanager
def kills(path: Path) -> Iterator[Case]:
    """Writers that are killed: at one of their calls to the system, or after some time."""
    at_work()
    words = [sys.executable, "-m", "tests.campaign.writer"]
    environment = {**os.environ, **importing(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as forker:
        assert forker.stdin is not None
        assert forker.stdout is not None

        def case(random: Random) -> None:
            assert forker.stdin is not None
            assert forker.stdout is not None
            lives = list[dict[str, Any]]()
            seed, layout = random.getrandbits(40), random.randrange(len(LAYOUTS))
            done = list[Tokens]()
            for _ in range(random.choice((1, 1, 2, 3))):  # killed again while it recovers
                at, after = (random.randint(1, 90), 0.0) if random.random() < 0.7 else (0, random.random() * 0.05)
                lives.append({"path": str(path / "kv"), "seed": seed, "layout": layout, "at": at, "after": after})
                forker.stdin.write(json.dumps(lives[-1]) + "\n")
                forker.stdin.flush()
                answer = json.loads(forker.stdout.readline())
                assert answer["code"] in (0, -9), answer
                done += [tuple(tokens) for tokens in answer["kept"]]
            if not (path / "kv").exists():
                return  # killed before it began
            store = disk_store(path / "kv", layout=LAYOUTS[layout])
            settled(store)
            for tokens in done:
                assert found(store, tokens) == len(tokens) // 4 * 4, "it was kept for good"
            assert store.close()
            reopened(path / "kv", LAYOUTS[layout], prompts(Random(seed)), random, frozenset())
            emptied(path / "kv")

        try:
            yield case
        finally:
            forker.stdin.close()


# --- damage ---


@contextmanager
def damage(path: Path) -> Iterator[Case]:
    """Yield cases of a folder of two models. Some of its files are damaged, while no store has it open or while one
    has.
    """
    at_work()
    random = Random(1)
    templates = list[tuple[Layout, Path, list[Tokens]]]()
    for number, layout in enumerate(LAYOUTS):
        some = prompts(random, 5)
        with_some(path / f"whole-{number}", layout, some)
        with_some(path / f"whole-{number}", OTHER, some[:2])
        templates.append((layout, path / f"whole-{number}", some))

    def case(random: Random) -> None:
        layout, whole, some = random.choice(templates)
        kv = Path(shutil.copytree(whole, path / "kv"))
        names = sorted(kv.iterdir())
        runs = [name for name in names if classify_name(name.name) == "run"]
        harmed = random.sample(names, random.choice((1, 1, 2, 5)))
        early = random.random() < 0.6
        store = None if early else disk_store(kv, layout=layout)
        for file in harmed:
            if file.name != "LOCK" or early:
                harm(file, [one for one in runs if one != file and one.is_file() and not one.is_symlink()], random)
        if random.random() < 0.3:
            assert run_command("cache", "ls", str(kv)) in (0, 2)
            assert run_command("cache", "verify", str(kv)) in (0, 1, 2)
        expected = {kind for file in harmed if early and (kind := unfit(file, layout))}
        store = store or reopened_if_it_may(kv, layout)
        if store is not None:
            settled(store)
            for tokens in some:
                found(store, tokens)
            aside = len(list(kv.glob(QUARANTINE + "*")))
            figures = counted(store)
            assert figures["rekindle_cache_quarantined_total"] == damaged(store, "run") >= aside, UNCOUNTED
            uncounted = [kind for kind in expected if not damaged(store, kind)]
            assert not uncounted, UNCOUNTED
            works(store, random)
            assert store.close()
            if random.random() < 0.2:
                assert run_command("cache", "gc", str(kv)) in (0, 2)
        emptied(kv)

    yield case


def reopened_if_it_may(path: Path, layout: Layout) -> Store | None:
    """None where the folder is refused, because of what stands in place of the lock or the journal."""
    try:
        return disk_store(path, layout=layout)
    except FolderUnusable as error:
        said = str(error)
    assert "\n" not in said
    return None
