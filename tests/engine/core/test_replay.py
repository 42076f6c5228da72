"""Traces: what was recorded replays to the same decisions, and any difference is found and shown."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path

import anyio
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effects.all import EffectRequest
from effects.compression import Compression, PromptPart
from effects.decode import Decoded
from effects.grammar import Grammar
from effects.ids import RequestId
from effects.job import Job, Sampling
from effects.lookup import FindPrefix, PrefixMissed
from effects.pacing import PaceSnapshot
from effects.snapshot import SaveSnapshot, SnapshotSaved
from effects.timer import StartTimer
from engine.__main__ import main
from engine.core.event_loop import Envelope
from engine.core.redact import Redactor
from engine.core.replay import ReplayDiffers, TraceCutShort, replay_file, world_json
from engine.core.trace import BadTrace, Digest, Recorder, converter, digest, encode, read_trace
from states.events import Cancelled, ForEngine, ForRequest, Submitted, TimerElapsed
from states.settings import Settings
from states.world import advance, make_world
from tests.engine.play import collect, engine, header
from tests.engine.stories import GOLDEN, STORIES, files

HELD = Sampling(grammar=Grammar("regex", "a private text"))
JOBS = [Job(tuple(range(n, 150 + n)), 40, HELD if n == 1 else Sampling(), (17,)) for n in range(3)]


async def record(path: Path, *, redacted: bool = False) -> None:
    """A busy minute: three overlapping conversations, one of which is broken off, and a continuation."""
    async with engine(trace=path, redacted=redacted) as running:
        answers = dict[int, tuple[int, ...]]()

        async def one(number: int) -> None:
            answers[number] = (await collect(running.door.submit(JOBS[number])))[0]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, 0)
            tasks.start_soon(one, 1)
            ticket = running.door.submit(JOBS[2])
            await anyio.sleep(0.002)
            ticket.cancel("client_gone")
            await collect(ticket)
        await collect(running.door.submit(Job(prompt=JOBS[0].prompt + answers[0], max_tokens=9)))


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.zst"])
async def test_what_was_recorded_replays(tmp_path: Path, name: str) -> None:
    await record(tmp_path / name)
    run = replay_file(tmp_path / name)
    assert run.events > 64
    assert not run.world.requests
    assert main(["replay", str(tmp_path / name)]) == 0


async def test_a_redacted_trace_replays_and_has_none_of_the_tokens(tmp_path: Path) -> None:
    await record(tmp_path / "open.jsonl")
    await record(tmp_path / "shut.jsonl.zst", redacted=True)
    run = replay_file(tmp_path / "shut.jsonl.zst")
    assert run.events > 64
    _, records = read_trace(tmp_path / "shut.jsonl.zst")
    shown = {token for _, record in records if isinstance(record, Envelope) for token in tokens_of(record)}
    assert len(shown) > 100
    assert shown & set(range(256)) <= {17}, "only the stop token keeps its name"
    assert "private text" in (tmp_path / "open.jsonl").read_text()
    with zstandard.open(tmp_path / "shut.jsonl.zst", "rt") as file:
        assert "private text" not in file.read()


def tokens_of(envelope: Envelope) -> tuple[int, ...]:
    match envelope.happened:
        case ForRequest(_, Submitted(job)):
            return job.prompt
        case ForRequest(_, Decoded(tokens)):
            return tokens
        case _:
            return ()


@pytest.mark.parametrize("redacted", [False, True])
async def test_decisions_about_background_work_are_in_the_trace_and_replay(tmp_path: Path, redacted: bool) -> None:
    """A snapshot that waits for the core, timers of the event loop, and no clock when they are folded again."""
    path, may_copy = tmp_path / "trace.jsonl", anyio.Event()

    async def save(*_: object) -> SnapshotSaved:
        await may_copy.wait()
        return SnapshotSaved(32, 4096)

    keeping = Settings(slots=2, max_context=1024, chunk=64, block_size=16, store=True)
    missing = {FindPrefix: lambda *_: PrefixMissed("empty_store"), SaveSnapshot: save}
    async with engine(keeping, trace=path, redacted=redacted, perform=missing) as running:

        def pace(_: RequestId, effect: PaceSnapshot) -> None:
            if effect.may_copy:
                may_copy.set()

        notify: dict[type, object] = running.event_loop.executors.notify  # type: ignore[assignment]
        notify[PaceSnapshot] = (pace,)
        await collect(running.door.submit(Job(tuple(range(40)), 2)))
        with anyio.fail_after(20):
            await may_copy.wait()
    assert not replay_file(path).world.requests
    records = [record for _, record in read_trace(path)[1]]
    effects = [record.effect for record in records if isinstance(record, EffectRequest)]
    assert [one for one in effects if isinstance(one, PaceSnapshot)] == [PaceSnapshot(may_copy=True)]
    assert [one.name for one in effects if isinstance(one, StartTimer)] == ["trim_interval", "snapshot_quiet"]
    events = [record.happened for record in records if isinstance(record, Envelope)]
    assert ForEngine(TimerElapsed("snapshot_quiet", 2)) in events


def test_redaction_keeps_equal_prefixes_equal_and_nothing_else() -> None:
    redactor = Redactor(make_world(Settings()))
    one = redactor.redact_prompt(RequestId(1), (1, 2, 3, 4))
    other = redactor.redact_prompt(RequestId(2), (1, 2, 9, 4))
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert one[3] != other[3], "the same token after another prefix must not show"


async def test_the_last_part_of_a_trace_cannot_go_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    await record(path)
    lines = path.read_text().splitlines(keepends=True)
    for kept in (len(lines) - 1, len(lines) - 3, 2):
        path.write_text("".join(lines[:kept]))
        with pytest.raises(ReplayDiffers, match="cut short"):
            replay_file(path)


async def test_a_trace_without_any_event_says_so(tmp_path: Path) -> None:
    """A server that has just started, or was killed at its start."""
    path = tmp_path / "run.jsonl"
    await record(path)
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    with pytest.raises(TraceCutShort, match=r"before its first event: .*\n  replayed: 0 events"):
        replay_file(path)


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.zst"])
async def test_a_killed_servers_trace_agrees_as_far_as_it_goes(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it was cut: it is no difference, and the exit status is another."""
    path = tmp_path / name
    await record(path)
    whole = path.read_bytes()
    if path.suffix == ".zst":
        whole = flush_every_line(whole)
    for share in (0.5, 0.8, 0.99):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(TraceCutShort) as cut:
            replay_file(path)
        assert main(["replay", str(path)]) == 3
        printed = capsys.readouterr().err
        assert str(cut.value) in printed
        events = re.search(r"after event (\d+): its server was killed.*\n  replayed: (\d+) events, and every", printed)
        assert events is not None
        assert int(events[2]) == int(events[1]) + 1 > 5
    text = STORIES["a_full_house"]().splitlines(keepends=True)
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join([*text[:4], *text[5:9]]))
    assert main(["replay", str(changed)]) == 1, "a difference before the cut is a difference"


def flush_every_line(trace: bytes) -> bytes:
    """Return a compressed trace as it is written by a server that has time to flush each event."""
    lines = zstandard.ZstdDecompressor().decompressobj().decompress(trace).splitlines(keepends=True)
    writer = zstandard.ZstdCompressor().compressobj()
    blocks = [writer.compress(line) + writer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for line in lines]
    return b"".join(blocks) + writer.flush()


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.zst"])
async def test_a_trace_is_its_owners_alone(tmp_path: Path, name: str) -> None:
    """Also where a file was there that others could read. Prompts are in it."""
    path = tmp_path / name
    for before in (None, 0o644):
        if before is not None:
            path.chmod(before)
        await record(path)
        assert path.stat().st_mode & 0o777 == 0o600


async def test_every_missing_or_doubled_line_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    await record(path)
    lines = path.read_text().splitlines(keepends=True)
    for at in range(1, len(lines), 7):
        if '"is":"Digest"' in lines[at] and '"last":false' in lines[at]:
            continue
        for changed in (lines[:at] + lines[at + 1 :], [*lines[:at], lines[at], *lines[at:]]):
            path.write_text("".join(changed))
            with pytest.raises(ReplayDiffers):
                replay_file(path)


def test_a_difference_shows_event_expected_and_actual(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "changed.jsonl"
    text = STORIES["a_turn_and_its_continuation"]()
    assert text.count('"position":41') == 1
    path.write_text(text.replace('"position":41', '"position":42'))
    assert main(["replay", str(path)]) == 1
    shown = capsys.readouterr().err.splitlines()
    assert "after event" in shown[0]
    assert '"is":"Decoded"' in shown[0]
    assert shown[1].startswith("  recorded:")
    assert '"position":42' in shown[1]
    assert shown[2].startswith("  replayed:")
    assert '"position":41' in shown[2]


def test_a_changed_world_is_found_by_its_digest(tmp_path: Path) -> None:
    """Same asks, other world: only the digest sees that a reason changed."""
    path = tmp_path / "changed.jsonl"
    text = STORIES["everything_goes_wrong_and_the_answer_comes"]()
    path.write_text(text.replace('"world":"', '"world":"0', 1))
    with pytest.raises(ReplayDiffers, match="Digest"):
        replay_file(path)


def test_an_impossible_event_is_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    first, second, *_ = STORIES["a_full_house"]().splitlines(keepends=True)
    odd = encode(Envelope(0, 0, ForRequest(RequestId(9), Decoded((1,)))))
    path.write_text(first + odd + "\n")
    with pytest.raises(ReplayDiffers, match="cannot happen here"):
        replay_file(path)
    assert second


@pytest.mark.parametrize(("name", "path"), list(files()), ids=list(STORIES))
def test_golden_traces_replay(name: str, path: Path) -> None:
    assert path.read_text() == STORIES[name](), "behaviour changed: read the difference, then record the stories anew"
    assert not replay_file(path).world.requests


def test_until_shows_the_world_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(GOLDEN / "a_full_house.jsonl"), "--until", "3"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {request["is"] for request in shown["requests"].values()} == {"Prefilling", "Waiting"}
    assert shown == json.loads(json.dumps(world_json(replay_file(GOLDEN / "a_full_house.jsonl", 3).world)))


def enveloped(event: str, more: str = "") -> str:
    """A record's line, whose event is in a request's name."""
    happened = f'{{"request":0,"event":{event},"is":"ForRequest"}}'
    return f'{{"seq":0,"at_ns":0,{more}"happened":{happened},"is":"Envelope"}}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{bad", "line 2"),
        ('{"is":"Nonsense"}', "line 2"),
        (enveloped('{"is":"Cancelled","reason":"x"}'), "line 2"),
        (enveloped('{"is":"Cancelled","reason":"shutdown"}', '"more":1,'), "line 2"),
        (enveloped("null"), "line 2"),
        ('{"seq":"0","at_ns":[],"happened":null,"is":"Envelope"}', "line 2"),
        ("[" * 100_000, "line 2"),
        ("[" + "[]," * 100_000 + "0]", "more than 65536 lists and objects"),
        ('{"is":"Digest","seq":1e999,"world":""}', "line 2"),
        ('{"is":"Digest","seq":NaN,"world":""}', "line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(STORIES["a_full_house"]().splitlines()[0] + "\n" + line + "\n")
    assert main(["replay", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("first", ["", "{}", '{"trace":99}', "[]", "null", '{"trace":1}'])
def test_a_bad_header_is_named(tmp_path: Path, first: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(first + "\n")
    with pytest.raises(BadTrace, match="line 1"):
        read_trace(path)


def test_a_line_that_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.core.trace.LINE_LIMIT", 1000)
    path = tmp_path / "long.jsonl.zst"
    path.write_bytes(zstandard.compress(b"x" * 10_000_000))
    with pytest.raises(BadTrace, match="longer"):
        read_trace(path)


def test_a_million_wrong_tokens_are_one_mistake(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    event = '{"tokens":[' + ",".join(['"x"'] * 1_000_000) + '],"is":"Decoded"}'
    line = enveloped(event)
    path.write_text(STORIES["a_full_house"]().splitlines()[0] + "\n" + line + "\n")
    tracemalloc.start()
    with pytest.raises(BadTrace, match="line 2 is no record"):
        replay_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * len(line)


def test_damaged_zstd_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.zst"
    with path.open("wb") as file:
        file.write(zstandard.ZstdCompressor(write_checksum=True).compress(STORIES["a_full_house"]().encode()))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises((BadTrace, ReplayDiffers)):
        replay_file(path)


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "no/such/trace"]) == 2
    assert capsys.readouterr().err == "rekindle: no/such/trace: there is no such file\n"


def test_a_folder_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Is a directory" in line
    assert "Error" not in line


def test_a_disk_that_is_full_ends_the_trace_and_nothing_else(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    recorder = Recorder(tmp_path / "x", header(Settings()))
    recorder.start()
    recorder._file.close()  # noqa: SLF001
    recorder._file = full.open("w")  # noqa: SLF001
    world = make_world(Settings())
    for seq in range(100):
        event = Submitted(Job(prompt=(seq,) * 500, max_tokens=1))
        world, outs = advance(world, ForRequest(RequestId(seq), event))
        recorder.record(Envelope(seq, 0, ForRequest(RequestId(seq), event)), outs, world)
    recorder.close()
    assert "space" in recorder.failure


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.builds(
        Job,
        prompt=st.lists(st.integers(0, 2**31), min_size=1, max_size=20).map(tuple),
        max_tokens=st.integers(1, 100),
        compression=st.sampled_from((Compression(), Compression("always", 0, 7, (PromptPart("user", 1, 2, True),)))),
        sampling=st.builds(
            Sampling, temperature=st.floats(0, 2), seed=st.integers(0, 2**63 - 1), logprobs=st.integers(-1, 20)
        ),
    )
)
def test_events_survive_the_file(job: Job) -> None:
    envelope = Envelope(1, 2, ForRequest(RequestId(3), Submitted(job)))
    raw = json.loads(encode(envelope))
    assert raw["happened"]["event"]["job"]["prompt"] == list(job.prompt), "token ids are JSON arrays"
    assert converter().structure({key: raw[key] for key in raw if key != "is"}, Envelope) == envelope


def test_the_digest_sees_every_value() -> None:
    world = make_world(Settings())
    seen = {digest(world)}
    for event in (Submitted(Job((1, 2, 3), 4)), Submitted(Job((1, 2, 4), 4)), Submitted(Job((1, 2, 3), 5))):
        seen.add(digest(advance(world, ForRequest(RequestId(1), event))[0]))
    seen.add(digest(advance(world, ForRequest(RequestId(2), Submitted(Job((1, 2, 3), 4))))[0]))
    assert len(seen) == 5
    assert digest(advance(world, ForRequest(RequestId(1), Cancelled("deadline")))[0]) == digest(world)
    assert Digest(0, digest(world)) == Digest(0, digest(make_world(Settings())))
