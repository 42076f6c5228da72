"""Decoders of the store's own files, of kept responses and measurements: records framed well, and not what we wrote."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from attrs import asdict

from adapters.http.apis.openai_responses import ItemReferences, read_conversation
from adapters.http.edge_options import EdgeModel, EdgeOptions
from adapters.http.history import persistent_lru
from adapters.http.history.response_store import ResponseFolder, ResponseStore
from adapters.http.request.tool_definitions import SkippedTools
from adapters.http.wire.errors import ApiError
from adapters.http.wire.fields import Fields
from adapters.models.numerics.probe_result import Numerics
from adapters.store import index_journal, recent_prompts
from adapters.store.block_index import Entry
from adapters.store.disk import check_contents
from adapters.store.file_description import read_head
from adapters.store.files import seekable
from adapters.store.files.append_log import frame_record
from adapters.store.files.file_format import Newer, Outdated
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.files.seekable import Damaged
from adapters.store.recent_prompts import RecentPrompt, RecentPrompts
from engine.loading.calibration.calibrate_restore import RestoreTimes
from engine.settings.calibration_cache import UNFIT, CalibrationCache, What, read_small_file, replace_file
from tests.campaign.case import UNCOUNTED, Case
from tests.campaign.damage import BYTES, harm, spoilt
from tests.campaign.hostile import spoilt as spoilt_value
from tests.campaign.hostile import spoilt_bytes, text_of
from tests.store.kit import disk_store, files, save, settled

NUMERICS = Numerics("buckets", (4, 8, 64), 64, 64, "torch-cpu", 2, "x" * 16, 0.5, 10, 3)
EXAMPLES: tuple[tuple[What, Any, str], ...] = (
    ("numerics", Numerics, NUMERICS.to_json()),
    ("rates", RestoreTimes, RestoreTimes(5, 7, 1100, 1500).to_json()),
)
OPTIONS = EdgeOptions(EdgeModel("small", 4096, 500))
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
OWNERS = ("", "a" * 64)
NUMBERS = (0, 1, 2, 7, 255, 2**16, 2**31, 2**32 - 1, 2**48, 2**63, 2**64 - 1)


def harmed(raw: bytes, random: Random) -> bytes:
    return spoilt(raw, random.randbytes(200), random.choice(BYTES), random) if random.random() < 0.3 else raw


def number(random: Random, bits: int = 64) -> int:
    return min(random.choice(NUMBERS) if random.random() < 0.3 else random.randrange(100), 2**bits - 1)


@contextmanager
def journals(_: Path) -> Iterator[Case]:
    """Records that are framed well and say anything."""

    def record(random: Random) -> bytes:
        keys = tuple(random.randbytes(16) for _ in range(random.randrange(4)))
        tokens = random.randbytes(4 * random.choice((0, 1, 4, 8, 12, len(keys) * 4)))
        numbers = [number(random) for _ in range(4)]
        start, since = number(random, 32), number(random, 32)
        entry = Entry(
            numbers[0], start, random.randbytes(16), keys, tokens, numbers[1], random.randbytes(16), *numbers[2:]
        )
        entry.since = since
        raw = random.choice(
            (
                index_journal.encode_addition,
                index_journal.encode_addition,
                index_journal.encode_removal,
                index_journal.encode_hit,
            )
        )(entry)
        if random.random() < 0.2:
            raw = frame_record(spoilt_bytes(raw[8:], random))
        return raw

    def case(random: Random) -> None:
        raw = harmed(index_journal.MAGIC + b"".join(record(random) for _ in range(random.randrange(8))), random)
        kept = index_journal.parse_journal(raw)
        assert kept.records <= len(raw) // 8
        for entry in kept.entries.values():
            assert entry.keys
            assert entry.tokens
            assert max(entry.handle, entry.last_turn) <= index_journal.MAX_HANDLE
        again = index_journal.parse_journal(b"".join(index_journal.encode_snapshot(kept.entries.values())))
        assert list(again.entries) == list(kept.entries)

    yield case


@contextmanager
def recents(_: Path) -> Iterator[Case]:
    def case(random: Random) -> None:
        some = [
            RecentPrompt(number(random), number(random), number(random, 32), random.randbytes(4 * random.randrange(20)))
            for _ in range(random.randrange(8))
        ]
        held = RecentPrompts(max_prompts=random.choice((2, 256)), max_bytes=random.choice((40, 1 << 20)))
        raw = harmed(b"".join(recent_prompts.encode_snapshot(some)), random)
        recent_prompts.restore_prompts(raw, held)
        assert held.held_bytes == sum(len(one.rest) for one in held.list_prompts()) <= max(held.max_bytes, 0)
        prompt = tuple(random.randrange(100) for _ in range(10))
        assert 0 <= held.longest_match(prompt, 5) <= 10
        held.add(prompt)
        assert held.longest_match(prompt, 1) == 10

    yield case


@contextmanager
def seek_tables(path: Path) -> Iterator[Case]:
    """Whole files with heads and tables that were made up, checksums right or not."""
    store = disk_store(path / "kv")
    save(store, tuple(range(1, 25)))
    settled(store)
    assert store.close()
    (template,) = files(path / "kv")
    raw = template.read_bytes()
    count = seekable.parse_frame_count(raw[-seekable.FOOT.size :])
    table = seekable.parse_table(raw[-seekable.compute_table_size(count) :], len(raw))
    first = bytearray(table[0][1])
    seekable.decompress(raw[: table[0][0]], memoryview(first))
    size = int.from_bytes(first[:8], "little")
    header, tokens, rest = json.loads(bytes(first[8 : 8 + size])), bytes(first[8 + size :]), raw[table[0][0] :]
    rest = rest[: -seekable.compute_table_size(count)]

    def case(random: Random) -> None:
        text = text_of(spoilt_value(header, random)).encode() if random.random() < 0.7 else json.dumps(header).encode()
        length = number(random) if random.random() < 0.1 else len(text)
        content = length.to_bytes(8, "little") + text + harmed(tokens, random)
        frame = seekable.create_compressor(1).compress(content)
        sizes = [(len(frame), len(content)), *table[1:]]
        if random.random() < 0.3:
            at = random.randrange(len(sizes))
            sizes[at] = (number(random, 32), number(random, 32))
        if random.random() < 0.2:
            sizes *= random.choice((0, 2, 100))
        file = path / template.name
        file.write_bytes(harmed(frame + rest + seekable.encode_table(sizes), random))
        with file.open("rb") as opened:
            descriptor, now = opened.fileno(), os.fstat(opened.fileno()).st_size
            with suppress(Damaged, Newer, Outdated):
                read_head(descriptor, now)
            with suppress(Damaged, Newer, Outdated):
                check_contents.check_run(template.name, descriptor)

    yield case


@contextmanager
def kept(path: Path) -> Iterator[Case]:
    """Yield cases in which a start finds the measurements of an earlier one damaged: that is counted, logged without a
    traceback, and measured again.
    """

    def case(random: Random) -> None:
        what, kind, text = random.choice(EXAMPLES)
        mine, stranger = CalibrationCache(path / "rekindle"), path / "stranger"
        for key in ("a", "b"):
            replace_file(mine.locate(what, key), text, lambda new: new.replace(mine.locate(what, key)))  # noqa: B023 - at once
        stranger.write_text("{}")
        file = mine.locate(what, "a")
        harm(file, [mine.locate(what, "b"), stranger], random)
        there, whole = os.path.lexists(file), None
        with suppress(*UNFIT):
            whole = kind.from_json(read_small_file(file))
        if what == "numerics":
            assert mine.load_or_make("a", lambda: NUMERICS, Numerics.to_json, Numerics.from_json) == (whole or NUMERICS)
        else:
            assert mine.recall("a", kind.from_json) == whole
        assert mine.damaged[what] == (there and whole is None), UNCOUNTED
        shutil.rmtree(mine.folder)

    yield case


@contextmanager
def outcomes(_: Path) -> Iterator[Case]:
    """Yield cases of what is kept of the numerics probe and of loading times."""

    def case(random: Random) -> None:
        _, kind, text = random.choice(EXAMPLES)
        changed = text_of(spoilt_value(json.loads(text), random)).encode()
        raw = harmed(changed, random)
        found: Any = None
        with suppress(ValueError, RecursionError):
            found = kind.from_json(raw.decode())
        if found is not None:
            assert asdict(kind.from_json(found.to_json())) == asdict(found)

    yield case


@contextmanager
def responses(path: Path) -> Iterator[Case]:
    """Kept responses, whole or damaged, their digests right or not: read as a conversation, or refused."""
    response = {"id": "resp_" + "0" * 24, "previous_response_id": None, "output": [MESSAGE, CALL]}
    items = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": "msg_" + "0" * 28}]

    def files_of(random: Random) -> list[bytes]:
        found = []
        for _ in range(random.randrange(1, 4)):
            lines = [spoilt_value(part, random) if random.random() < 0.5 else part for part in (response, items)]
            before = random.choice(("", f"resp_{0:024x}", f"resp_{1:024x}", "../x"))
            whose = random.choice(OWNERS) + " " + before
            body = b"\n".join(line.encode() for line in (whose, *map(text_of, lines)))
            digest = persistent_lru.digest_body(body if random.random() < 0.8 else body[:-1])
            found.append(harmed(digest + b"\n" + body, random))
        return found

    def case(random: Random) -> None:
        raws = files_of(random)
        with TemporaryDirectory(dir=path) as name, closing(PrivateFolder.open(Path(name))) as folder:
            for number, raw in enumerate(raws):
                (folder.path / f"resp_{number:024x}").write_bytes(raw)
            found = ResponseStore(folder)
            found.load()
        for folder_store in (ResponseFolder(found, owner) for owner in OWNERS):
            for number in range(3):
                earlier = folder_store.find_conversation(f"resp_{number:024x}", OPTIONS.limits.max_body) or []
                with suppress(ApiError):
                    read_conversation(
                        Fields({"input": "And?"}), earlier, ItemReferences(folder_store, OPTIONS), SkippedTools()
                    )

    yield case
