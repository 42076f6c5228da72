"""The disk tier over restarts, and with everything that can go wrong: a miss at worst, never other rows."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from adapters.store import index_journal
from adapters.store.disk.file_names import QUARANTINE
from adapters.store.disk.folder_upkeep import MOST_QUARANTINED
from adapters.store.files.private_folder import FolderInUse, FolderUnusable, PrivateFolder
from adapters.store.files.seekable import Damaged
from adapters.store.store import Store
from tests.store import kit
from tests.store.kit import LAYOUT, OTHER, Opening, disk_store, files, save, settled

ROOT = Path(__file__).parents[3]
ONE, TWO = tuple(range(1, 41)), (*range(1, 21), *range(200, 240))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def kept(store: Store, tokens=ONE) -> int:
    return kit.kept(store, tokens)


def filled(path: Path, *sequences, **options) -> None:
    store = disk_store(path, **options)
    for tokens in sequences:
        save(store, tokens)
        settled(store)
    assert store.close()


def reopened(path: Path, **options) -> Store:
    store = disk_store(path, **options)
    settled(store)
    return store


@pytest.mark.parametrize("codec", ["auto", "store", "zstd"])
def test_what_was_kept_is_there_after_a_restart(path: Path, codec: str) -> None:
    filled(path, ONE, TWO, codec=codec)
    store = reopened(path)
    assert (kept(store, ONE), kept(store, TWO)) == (40, 60)
    assert store.collect_figures().build_json()["quarantined"] == 0
    store.close()


def test_only_new_blocks_are_written(path: Path) -> None:
    filled(path, ONE, ONE, TWO, (*ONE, 7, 7, 7, 7))
    sizes = [len(entry.keys) for entry in reopened(path).lower_tiers[0].index.entries.values()]
    assert sum(sizes) == 10 + 10 + 1


def test_nobody_else_may_read_it(path: Path) -> None:
    filled(path, ONE)
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}


@pytest.mark.parametrize("spoil", ["remove", "empty", "tear", "flip", "other"])
def test_the_journal_may_be_lost(path: Path, spoil: str) -> None:
    filled(path, ONE, TWO)
    file = path / index_journal.NAME
    raw = file.read_bytes()
    match spoil:
        case "remove":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
        case "tear":
            file.write_bytes(raw[:-7])
        case "flip":
            file.write_bytes(raw[:60] + bytes([raw[60] ^ 1]) + raw[61:])
        case _:
            file.write_bytes(os.urandom(len(raw)))
    store = reopened(path)
    assert (kept(store, ONE), kept(store, TWO)) == (40, 60)
    store.close()
    again = index_journal.parse_journal(file.read_bytes())
    assert again.whole
    assert len(again.entries) == 2, "it is made whole again"


def test_hits_are_remembered_over_a_restart(path: Path) -> None:
    filled(path, ONE)
    store = reopened(path)
    for _ in range(3):
        kept(store)
    store.close()
    (entry,) = reopened(path).lower_tiers[0].index.entries.values()
    assert entry.hits == 3


def test_a_journal_does_not_grow_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.store.disk.index_journal_file.SLACK", 20)
    store, sizes = disk_store(path, disk=30_000), list[int]()
    for number in range(50, 130):
        save(store, (number, *ONE[1:]))
        settled(store)
        sizes.append((path / index_journal.NAME).stat().st_size)
    assert store.collect_figures().build_json()["evictions"] > 50
    assert max(sizes) < 2 * (sum(sizes) / len(sizes)), "it was written anew a few times"
    store.close()


@pytest.mark.parametrize("with_journal", [True, False])
@pytest.mark.parametrize(
    "harm", ["truncate", "flip_head", "flip_rows", "flip_end", "swap", "rename", "foreign", "empty"]
)
def test_a_damaged_file_is_put_aside_and_the_rest_is_served(path: Path, harm: str, with_journal: bool) -> None:
    filled(path, ONE, (9, *ONE))
    one, two = files(path)
    raw = one.read_bytes()
    match harm:
        case "truncate":
            one.write_bytes(raw[:-1])
        case "flip_head":
            one.write_bytes(raw[:40] + bytes([raw[40] ^ 255]) + raw[41:])
        case "flip_rows":
            one.write_bytes(raw[:-200] + bytes([raw[-200] ^ 255]) + raw[-199:])
        case "flip_end":
            one.write_bytes(raw[:-12] + bytes([raw[-12] ^ 255]) + raw[-11:])
        case "swap":
            one.write_bytes(two.read_bytes())
            two.write_bytes(raw)
        case "rename":
            two.rename(one)
        case "foreign":
            filled(path.with_name("foreign"), ONE, layout=OTHER)
            shutil.copy(files(path.with_name("foreign"))[0], one)
        case _:
            one.write_bytes(b"")
    if not with_journal:
        (path / index_journal.NAME).unlink()
    store = reopened(path)
    for _ in range(2):
        for tokens in (ONE, (9, *ONE)):
            try:
                assert kept(store, tokens) in (0, 40)
            except (Damaged, FileNotFoundError):
                continue
    found = kept(store, ONE) + kept(store, (9, *ONE))
    aside = store.collect_figures().build_json()["quarantined"]
    assert (found, aside) == {"swap": (0, 2), "rename": (0, 1)}.get(harm, (40, 1))
    assert len(list(path.glob(QUARANTINE + "*"))) == aside
    save(store, ONE)
    save(store, (9, *ONE))
    settled(store)
    assert (kept(store, ONE), kept(store, (9, *ONE))) == (40, 40), "it is written again"
    store.close()


def test_what_is_put_aside_is_bounded(path: Path) -> None:
    filled(path, *(((number, *ONE)) for number in range(100, 120)))
    for file in files(path):
        file.write_bytes(b"not a cache file at all")
    store = reopened(path)
    assert store.collect_figures().build_json()["quarantined"] == 20
    assert len(list(path.glob(QUARANTINE + "*"))) == MOST_QUARANTINED
    store.close()


def test_a_newer_format_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.store.files.file_format.VERSION", 5)
    filled(path, ONE)
    monkeypatch.undo()
    (path / index_journal.NAME).unlink()
    store = reopened(path)
    assert kept(store) == 0
    assert len(files(path)) == 1
    assert store.collect_figures().build_json()["quarantined"] == 0
    store.close()


def test_another_identity_shares_the_folder_and_nothing_else(path: Path) -> None:
    filled(path, ONE)
    filled(path, ONE, layout=OTHER)
    for layout in (LAYOUT, OTHER):
        store = reopened(path, layout=layout)
        assert kept(store) == 40
        assert len(store.lower_tiers[0].index) == 2
        store.close()


def test_another_identity_is_evicted_first(path: Path) -> None:
    filled(path, ONE, layout=OTHER)
    size = files(path)[0].stat().st_size
    filled(path, ONE, TWO, disk=2 * size + size // 2 + 400)
    store = reopened(path)
    assert kept(store, ONE) == 40
    assert len(store.lower_tiers[0].index) == 2
    store.close()
    assert kept(reopened(path, layout=OTHER)) == 0


def test_what_a_crash_left_behind_is_removed(path: Path) -> None:
    filled(path, ONE)
    run = next(path.glob("*.zst")).name
    for name in (run, "journal", "recent-" + "0" * 32):
        (path / f".new-{name}").write_bytes(b"half a file")
    store = reopened(path)
    assert kept(store) == 40
    assert not list(path.glob(".new-*"))
    store.close()


def test_a_journal_that_cannot_be_read_just_now_is_not_taken_for_somebody_elses(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(path)
    assert (path / "journal").stat().st_size
    opener = PrivateFolder.open_existing

    def failing(folder: PrivateFolder, name: str, *more: int) -> int:
        if name == "journal":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opener(folder, name, *more)

    with monkeypatch.context() as patched:
        patched.setattr(PrivateFolder, "open_existing", failing)
        store = reopened(path)
        assert store.collect_figures().build_json()["read_errors"] == 1
        assert store.close()
    filled(path, ONE)
    store = reopened(path)
    assert kept(store) == len(ONE)
    assert store.close()


@pytest.mark.parametrize("lost", [512, 4096, 1 << 20])
def test_a_journal_whose_beginning_a_power_cut_took_is_rebuilt(path: Path, lost: int) -> None:
    """Sectors are written in any order: zeros where the first ones were to be, and what was written later behind."""
    filled(path)
    (path / "journal").write_bytes(bytes(lost) + b"records")
    store = reopened(path)
    assert kept(store) == 0
    save(store, ONE)
    settled(store)
    assert store.collect_figures().build_json()["rebuilt"] == 1
    assert store.close()
    store = reopened(path)
    assert kept(store) == len(ONE)
    assert store.close()


def test_a_journal_that_could_not_be_written_before_is_written_whole(path: Path) -> None:
    filled(path)
    store = disk_store(path)
    (path / "journal").unlink()
    save(store, ONE)
    settled(store)
    assert (path / "journal").read_bytes().startswith(index_journal.MAGIC)
    assert store.close()
    store = reopened(path)
    assert kept(store) == len(ONE)
    assert store.close()


def test_a_folder_with_somebody_elses_journal_is_not_used(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "journal").write_text("Dear diary, today")
    with pytest.raises(FolderUnusable, match="journal that is not ours"):
        disk_store(path)
    assert (path / "journal").read_text() == "Dear diary, today"


def test_a_journal_of_an_absurd_size_is_not_read(path: Path) -> None:
    filled(path, ONE)
    with (path / "journal").open("r+b") as file:
        file.truncate(8 << 40)
    store = reopened(path)
    assert kept(store) == 40
    store.close()


def test_files_that_are_not_ours_are_left_alone(path: Path) -> None:
    filled(path, ONE)
    theirs = ["notes.txt", ".new-hope.mkv", "damaged-car.jpg", *(f"recent-invoices-{n}.txt" for n in range(20))]
    for name in theirs:
        (path / name).write_text("mine")
    (path / "folder").mkdir()
    store = reopened(path, disk=1)
    assert kept(store) == 0
    store.close()
    assert all((path / name).read_text() == "mine" for name in theirs)


def test_a_budget_holds_from_the_start_and_while_running(path: Path) -> None:
    sequences = [(number, *range(39)) for number in range(50, 62)]
    filled(path, *sequences)
    size = files(path)[0].stat().st_size
    budget = 5 * size + size // 2
    store = reopened(path, disk=budget)
    assert store.lower_tiers[0].index.held_bytes <= budget
    for number in range(80, 90):
        save(store, (number, *range(39)))
        settled(store)
        on_disk = sum(file.stat().st_size for file in files(path))
        assert on_disk == store.lower_tiers[0].index.held_bytes <= budget
    assert store.collect_figures().build_json()["evictions"] == 12 - 5 + 10
    store.close()


def test_a_budget_smaller_than_a_run_keeps_nothing(path: Path) -> None:
    store = disk_store(path, disk=100)
    save(store, ONE)
    settled(store)
    assert store.collect_figures().build_json()["dropped_writes"] == 1
    assert not files(path)
    assert store.memory_tier.rows == {}
    store.close()


def test_two_processes_do_not_share_a_folder(path: Path) -> None:
    store = disk_store(path)
    with pytest.raises(FolderInUse, match="another process"):
        disk_store(path)
    store.close()
    disk_store(path).close()


def test_a_lock_does_not_outlive_its_process(path: Path) -> None:
    child = (
        "import sys; from pathlib import Path; from adapters.store.files.private_folder import PrivateFolder;"
        "folder = PrivateFolder.open(Path(sys.argv[1])); print('owned', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", child, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline() == b"owned\n"
        with pytest.raises(FolderInUse):
            PrivateFolder.open(path)
        process.kill()
        process.wait(10)
    PrivateFolder.open(path).close()


@pytest.mark.parametrize("kind", ["file", "link", "open to all", "not there to make"])
def test_a_folder_that_is_not_ours_alone_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "kv"
    match kind:
        case "file":
            path.write_text("")
        case "link":
            (tmp_path / "real").mkdir()
            path.symlink_to(tmp_path / "real")
        case "open to all":
            path.mkdir()
            path.chmod(0o777)
        case _:
            path = Path("/proc/no/such")
    with pytest.raises(FolderUnusable, match=str(path)):
        PrivateFolder.open(path)


def steps(tmp_path: Path) -> list[str]:
    """The system calls of one run's way to disk."""
    opening = Opening(lambda: None)
    store = disk_store(tmp_path / "count", folder=opening)
    settled(store)
    opening.arm(0)
    save(store, ONE)
    settled(store)
    store.close()
    return opening.folder.seen[:]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE], ids=errno.errorcode.get)
def test_whatever_write_step_fails_is_counted_and_the_next_one_works(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    names = steps(tmp_path)
    assert Counter(names)["append"] >= 3
    caplog.set_level(logging.WARNING)
    for at, name in enumerate(names, 1):
        path = tmp_path / f"{at}"
        opening = Opening(fail)
        store = disk_store(path, folder=opening)
        settled(store)
        opening.arm(at)
        caplog.clear()
        save(store, ONE)
        settled(store)
        harmless = name == "open_append" or names.index("sync_folder") < at - 1
        assert store.collect_figures().build_json()["write_errors"] == (0 if harmless else 1), (at, name)
        assert len(caplog.records) == store.collect_figures().build_json()["write_errors"]
        assert kept(store) in (0, 40)
        save(store, ONE)
        settled(store)
        assert kept(store) == 40, "it works again"
        assert store.close()
        store = reopened(path)
        assert kept(store) == 40
        assert not list(path.glob(".new-*"))
        store.close()


def test_a_run_that_was_not_written_for_good_keeps_out_no_later_one(path: Path) -> None:
    """Its name was there already when the folder could not be synced; then a longer run is written."""

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    opening = Opening(fail)
    store = disk_store(path, folder=opening)
    settled(store)
    opening.arm(steps(path.parent / "steps").index("sync_folder") + 1)
    save(store, ONE[:20])
    settled(store)
    assert store.collect_figures().build_json()["write_errors"] == 1
    assert not files(path)
    save(store, ONE)
    settled(store)
    assert store.close()
    (path / index_journal.NAME).unlink()
    assert kept(reopened(path)) == 40


@pytest.mark.parametrize("instead", ["a folder", "a link", "nothing"])
def test_what_is_no_file_any_more_is_asked_for_once_and_counted(path: Path, instead: str) -> None:
    filled(path, ONE)
    store = reopened(path)
    (file,) = files(path)
    file.unlink()
    if instead == "a folder":
        file.mkdir()
    elif instead == "a link":
        file.symlink_to(path / index_journal.NAME)
    with pytest.raises(FileNotFoundError):
        kept(store)
    assert kept(store) == 0
    assert store.collect_figures().build_json()["read_errors"] == 1
    assert store.close()


def test_a_pipe_in_the_journals_place_holds_nothing_up(path: Path) -> None:
    store = disk_store(path)
    settled(store)
    (path / index_journal.NAME).unlink()
    os.mkfifo(path / index_journal.NAME)
    save(store, ONE)
    settled(store)
    assert kept(store) == 40
    assert store.close()


def test_a_damaged_journal_and_damaged_recent_prompts_are_counted(path: Path) -> None:
    store = disk_store(path)
    save(store, ONE)
    store.count_shared_tokens(ONE, 10)
    settled(store)
    assert store.collect_figures().build_json()["rebuilt"] == 0
    assert store.close()
    for file in (path / index_journal.NAME, *path.glob("recent-*")):
        file.write_bytes(file.read_bytes()[:-1])
    store = reopened(path)
    assert store.collect_figures().build_json()["rebuilt"] == 2
    assert store.damaged_files == {"run": 0, "journal": 1, "recent": 1, "answers": 0, "codec": 0}
    assert kept(store) == 40
    assert store.close()


KILLED = """
import os, sys
from pathlib import Path
from tests.store import kit
from tests.store.kit import Opening, die, disk_store, save, settled
from tests.store.disk.test_disk import ONE, TWO

def child(path, at):
    opening = Opening(die)
    store = disk_store(path, folder=opening)
    save(store, ONE)
    settled(store)
    opening.arm(at)
    save(store, TWO)
    settled(store)

for at in range(1, int(sys.argv[2]) + 1):
    if not (pid := os.fork()):
        child(Path(sys.argv[1]) / str(at), at)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_kill_at_any_step_leaves_whole_runs(tmp_path: Path) -> None:
    """Each step in a process of its own, killed there: what was whole stays, what was not is gone."""
    names = steps(tmp_path)
    words = [sys.executable, "-c", KILLED, str(tmp_path), str(len(names))]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(names)
    for at, name in enumerate(names, 1):
        store = reopened(tmp_path / str(at))
        assert kept(store, ONE) == 40, name
        assert kept(store, TWO) == (60 if at > names.index("rename") + 1 else 20), name
        assert store.collect_figures().build_json()["quarantined"] == 0
        assert not list((tmp_path / str(at)).glob(".new-*"))
        store.close()


NOTED = """
import os, sys
from pathlib import Path
from tests.store import kit
from tests.store.kit import Opening, die, disk_store, settled

def child(path, at, known):
    opening = Opening(die)
    store = disk_store(path, folder=opening)
    settled(store)
    for number in range(known):
        store.count_shared_tokens((1, 2, 3, number), 30)
        settled(store)
    opening.arm(at)
    store.count_shared_tokens((1, 2, 3, 99), 30)
    settled(store)
    os._exit(0)

for known in (0, 2):
    at, code = 0, -9
    while code == -9:
        at += 1
        if not (pid := os.fork()):
            child(Path(sys.argv[1]) / f"{known}-{at}", at, known)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(known, at, code)
"""


# By default the campaign's writers are killed anywhere, and `tests/store/test_recent.py` damages such files.
@pytest.mark.long
def test_a_kill_at_any_step_leaves_the_recent_prompts_before(tmp_path: Path) -> None:
    """The first one makes the file, later ones are appended to it."""
    words = [sys.executable, "-c", NOTED, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        known, steps_taken, code = map(int, line.split())
        assert code == 0
        assert steps_taken > 3
        for at in range(1, steps_taken):
            store = disk_store(tmp_path / f"{known}-{at}")
            assert len(store.recent_prompts) in (known, known + 1)
            assert store.recent_prompts.longest_match((1, 2, 3, 1), 2) == (
                4 if known == 2 else 3 * len(store.recent_prompts)
            )
            assert not list((tmp_path / f"{known}-{at}").glob(".new-*"))
            store.count_shared_tokens((1, 2, 3, 7), 30)
            settled(store)
            store.close()
            store = disk_store(tmp_path / f"{known}-{at}")
            assert store.recent_prompts.longest_match((1, 2, 3, 7), 1) == 4, "it goes on"
            store.close()


def test_a_disk_that_is_full_costs_hits_only(tmp_path: Path) -> None:
    """A real one, where this may be mounted."""
    small = tmp_path / "small"
    small.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", str(small)]
    if shutil.which("mount") is None or subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        store = disk_store(small / "kv")
        sequences = [(number, *ONE[1:]) for number in range(60, 80)]
        for tokens in sequences:
            save(store, tokens)
            store.count_shared_tokens(tokens, 30)
        settled(store)
        figures = store.collect_figures().build_json()
        assert figures["write_errors"] > 0
        assert 0 < figures["entries"] < len(sequences)
        assert sum(kept(store, tokens) for tokens in sequences) == 40 * figures["entries"]
        store.close()
        store = reopened(small / "kv")
        assert sum(kept(store, tokens) for tokens in sequences) == 40 * figures["entries"]
        assert not list((small / "kv").glob(".new-*"))
        store.lower_tiers[0].index.budget = store.lower_tiers[0].index.held_bytes
        save(store, TWO)
        settled(store)
        assert kept(store, TWO) == 60, "what is evicted makes room"
        store.close()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_read_error_in_the_middle_deletes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, ONE)
    real = os.preadv
    for at in range(1, 5):
        store, calls = reopened(path), [0]

        def fail(*about, at=at, calls=calls) -> int:
            calls[0] += 1
            if calls[0] == at:
                raise OSError(errno.EIO, "input/output error")
            return real(*about)

        with monkeypatch.context() as patched:
            patched.setattr("adapters.store.files.read_run.os.preadv", fail)
            with suppress(OSError):
                assert kept(store) == 40
        assert store.collect_figures().build_json()["read_errors"] == (1 if calls[0] >= at else 0)
        assert kept(store) == 40, "it was better the next time"
        store.close()


def test_no_clock_is_asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the machine's clocks nor the files' times decide what is kept: they may jump as they like."""

    def history(folder: Path) -> list[tuple[int, int, int]]:
        store = disk_store(folder, disk=9000, codec="store")
        for number in range(9):
            save(store, (number % 4, *ONE[1:], number))
            settled(store)
            kept(store, (number % 3, *ONE[1:]))
        for file in files(folder):
            os.utime(file, (number * 10**9, 0))
        store.close()
        store = reopened(folder, disk=7000, codec="store")
        for number in range(9, 14):
            save(store, (number, *ONE[1:]))
            settled(store)
        found = sorted(
            (entry.handle, entry.hits, entry.last_turn) for entry in store.lower_tiers[0].index.entries.values()
        )
        store.close()
        return found

    truth = history(path)
    draw = random.Random(3)
    for name, unit in (("time", 1.0), ("time_ns", 1), ("perf_counter", 1.0), ("perf_counter_ns", 1)):
        monkeypatch.setattr(time, name, lambda unit=unit: unit * draw.randrange(-(10**18), 10**18))
    assert history(path.with_name("again")) == truth
    assert len(truth) > 1


def test_a_folder_that_disappears_costs_hits_only(path: Path) -> None:
    store = disk_store(path)
    save(store, ONE)
    settled(store)
    shutil.rmtree(path)
    with pytest.raises(FileNotFoundError):
        kept(store)
    assert kept(store) == 0
    save(store, TWO)
    settled(store)
    assert store.collect_figures().build_json()["write_errors"] == 1
    assert not path.exists()
    assert store.close()


def test_a_folder_that_becomes_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    store = disk_store(path)
    path.rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    save(store, ONE)
    settled(store)
    assert kept(store) == 40
    assert not list((tmp_path / "elsewhere").iterdir())
    store.close()


def test_a_read_error_deletes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, ONE)
    store = reopened(path)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(PrivateFolder, "open_existing", fail)
        with pytest.raises(OSError, match="input/output"):
            kept(store)
    assert store.collect_figures().build_json()["read_errors"] == 1
    assert kept(store) == 40, "it was better the next time"
    store.close()


def test_what_is_read_is_not_evicted(path: Path) -> None:
    filled(path, ONE)
    size = files(path)[0].stat().st_size
    store = reopened(path, disk=size + size // 2)
    name, _ = store.find_prefix((*ONE, 0), 0)
    save(store, (5, *ONE))
    settled(store)
    assert len(files(path)) == 1
    store.release(name)
    save(store, (6, *ONE))
    settled(store)
    assert kept(store, (6, *ONE)) == 40
    assert kept(store, ONE) == 0
    store.close()


def test_a_full_queue_drops_and_what_was_dropped_is_written_later(path: Path) -> None:
    store = disk_store(path, host=1 << 20)
    store.lower_tiers[0].max_queued_bytes = 0
    save(store, ONE)
    assert store.collect_figures().build_json()["dropped_writes"] == 1
    assert kept(store) == 40, "host memory has it"
    store.lower_tiers[0].max_queued_bytes = 1 << 20
    save(store, ONE)
    settled(store)
    store.close()
    assert kept(reopened(path)) == 40


def test_ten_thousand_entries_are_there_without_a_look_into_files(path: Path) -> None:
    from adapters.store.block_index import Entry  # noqa: PLC0415
    from adapters.store.block_keys import chain_keys, pack_tokens  # noqa: PLC0415
    from adapters.store.files.file_format import format_name  # noqa: PLC0415

    path.mkdir(mode=0o700)
    tokens = [pack_tokens(range(number, number + 32)) for number in range(10_000)]
    entries = [
        Entry(number + 1, 0, bytes(16), chain_keys(bytes(16), packed, 4), packed, 1, bytes(16))
        for number, packed in enumerate(tokens)
    ]
    for entry in entries:
        (path / format_name(entry.keys[-1], entry.handle)).write_bytes(b"x")
    (path / index_journal.NAME).write_bytes(b"".join(index_journal.encode_snapshot(entries)))
    store = disk_store(path)
    assert len(store.lower_tiers[0].index) == 10_000, (
        "the journal's word: a look into any of these files would have refused it"
    )
    store.close()
