"""The timeline of a trace: every request once, its states in order, as long as they were, and nothing of its text."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections import defaultdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from attrs import evolve

from effects.all import Launch
from effects.decode import Decoded
from effects.ids import DeviceFailed, RequestId
from effects.job import Job
from effects.prefill import PrefillAdvanced, RunPrefill
from engine.__main__ import main
from engine.core.event_loop import Envelope
from engine.core.replay import Replay
from engine.core.request_meter import STAGES, RequestMeter
from engine.core.trace import VERSION, read_trace
from engine.tools.timeline import collect_timeline, timeline_page
from engine.tools.timeline.collect_timeline import Timeline
from engine.tools.timeline.timeline_page import ReadTrace, build_page, write_page
from states.events import ForRequest, Submitted
from states.settings import Settings
from states.world import advance, make_world
from tests.engine.play import collect as collected
from tests.engine.play import engine, header
from tests.engine.stories import GOLDEN, STORIES, Teller

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{data}}{{style}}"


def data_of(html: str) -> dict[str, Any]:
    (packed,) = re.findall(r'<script type="text/plain" id="data">([A-Za-z0-9+/=]*)</script>', html)
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return found


def viewed(path: Path, **how: Any) -> dict[str, Any]:
    out = path.with_suffix(".html")
    write_page(path, out, **how)
    return data_of(out.read_text())


def times(data: dict[str, Any]) -> list[int]:
    return list(accumulate(data["times"]))


def spans(data: dict[str, Any], name: str) -> list[tuple[int, int, int, int]]:
    """(owner, kind, first event, last event)."""
    raw, last = data[name], len(data["times"]) - 1
    starts = list(accumulate(raw["start"]))
    stops = [last if took < 0 else start + took for start, took in zip(starts, raw["took"], strict=True)]
    return list(zip(raw["owner"], raw["kind"], starts, stops, strict=True))


def names(things: dict[str, Any]) -> list[str]:
    return [things["kinds"][kind][0] for kind in things["order"]]


def field_of(things: dict[str, Any], at: int, name: str) -> Any:
    kind = things["order"][at]
    column, place = things["kinds"][kind][1][name], things["order"][:at].count(kind)
    if isinstance(column, list):
        return column[place]
    return column["all"] if "all" in column else column["texts"][column["of"][place]]


async def busy(path: Path) -> None:
    """Five requests, more than there are slots; one is broken off and one goes on from another."""
    async with engine(trace=path) as running:
        jobs = [Job(tuple(range(n, 150 + n)), 20) for n in range(3)]

        async with anyio.create_task_group() as tasks:
            for job in jobs[:2]:
                tasks.start_soon(collected, running.door.submit(job))
            ticket = running.door.submit(jobs[2])
            await anyio.lowlevel.checkpoint()
            ticket.cancel("client_gone")
            await collected(ticket)
        await collected(running.door.submit(evolve(jobs[0], prompt=(*jobs[0].prompt, 7, 8))))
        await collected(running.door.submit(Job((5, 6), 1)))


async def test_every_request_is_there_once_and_its_bars_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.zst"
    await busy(path)
    data = viewed(path)
    header_, records = read_trace(path)
    run, meter, closed = Replay.from_header(header_), RequestMeter(), dict[int, Any]()
    submitted, stamps, spent = list[int](), list[int](), defaultdict[int, dict[str, int]](dict)
    for number, record in records:
        before = run.world
        outs = run.feed(number, record)
        if isinstance(record, Envelope):
            meter.observe(record, outs, before, run.world)
            stamps.append(record.at_ns)
            for request, state in before.requests.items():  # the time that has passed, in the state that it was in
                name = STAGES[type(state)]
                spent[request][name] = spent[request].get(name, 0) + stamps[-1] - stamps[-2]
            if isinstance(record.happened, ForRequest) and isinstance(record.happened.event, Submitted):
                submitted.append(record.happened.request)
    assert data["requests"] == submitted == [1, 2, 3, 4, 5]
    assert data["seqs"] == [0, run.events - 1]
    assert len(data["times"]) == len(data["eventRows"]) == len(data["effectCounts"]) == run.events
    assert sum(data["effectCounts"]) == len(data["effectRows"]) == len(data["effects"]["order"])
    at, bars = times(data), spans(data, "bars")
    for row, request in enumerate(data["requests"]):
        own = [bar for bar in bars if bar[0] == row]
        assert own, "a request without a bar"
        assert all(one[3] == other[2] for one, other in pairwise(own)), "a gap or an overlap"
        found = dict[str, int]()
        for _, kind, start, stop in own:
            name = data["states"][kind]
            found[name] = found.get(name, 0) + at[stop] - at[start]
        assert found == {name: ns // 1000 for name, ns in spent[request].items()}
    assert not closed


async def test_launches_are_on_their_lane_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    await busy(path)
    data = viewed(path)
    launches, (_, records) = spans(data, "launches"), read_trace(path)
    recorded = [record for _, record in records if isinstance(record, Launch)]
    assert len(launches) == len(recorded)
    assert data["launches"]["size"] == [len(launch.effect_requests) for launch in recorded]
    assert max(data["launches"]["together"]) == 2, "two decoded together"
    assert all(one[3] <= other[2] for one, other in pairwise(launches)), "two at once on one lane"
    kinds = names(data["effects"])
    assert [kinds[first] for _, first, _, _ in launches] == [
        type(one.effect_requests[0].effect).__name__ for one in recorded
    ]


def test_a_step_that_joins_a_launch_is_shown_with_its_other_members(tmp_path: Path) -> None:
    path = tmp_path / "story.jsonl"
    path.write_text(STORIES["a_prompt_beside_its_neighbour"]())
    recorded = [record for _, record in read_trace(path)[1] if isinstance(record, Launch)]
    members = viewed(path)["launches"]["together"]
    joined = [count for count, launch in zip(members, recorded, strict=True) if launch.joins]
    assert joined
    assert min(joined) == 2


def test_hits_misses_and_what_each_event_led_to(tmp_path: Path) -> None:
    path = tmp_path / "story.jsonl"
    path.write_text(STORIES["compressed_restored_and_speculated"]())
    data = viewed(path)
    events, effects = names(data["events"]), names(data["effects"])
    found = events.index("PrefixFound")
    assert field_of(data["events"], found, "tier") == "host"
    lookups = [span for span in spans(data, "store") if effects[span[1]] == "FindPrefix"]
    assert found in [last for *_, last in lookups]
    starts = [0, *accumulate(data["effectCounts"])]
    assert "RestoreBlocks" in effects[starts[found] : starts[found + 1]], "what it led to is shown with it"
    closing = effects.index("CloseStream")
    assert field_of(data["effects"], closing, "finish") in {"stop", "length"}
    assert field_of(data["effects"], closing, "report.restored_tokens") > 0


@pytest.mark.parametrize("name", list(STORIES))
def test_every_story_has_a_timeline(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "view", str(GOLDEN / f"{name}.jsonl"), "-o", str(tmp_path / "out.html")]) == 0
    data = data_of((tmp_path / "out.html").read_text())
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out.html'}: {len(data['requests'])} request")
    assert data["about"]["trouble"] == []
    assert sorted(set(data["eventRows"]) - {-1}) == list(range(len(data["requests"]))), "each has an event"


def test_rejected_requests_and_lost_slots_are_there_too(tmp_path: Path) -> None:
    full = viewed(copied(tmp_path, "a_full_house"))
    assert len(full["requests"]) > len({owner for owner, *_ in spans(full, "bars")}), "one was turned away at once"
    lost = viewed(copied(tmp_path, "a_device_that_dies"))
    at = names(lost["events"]).index("SlotsLost")
    assert lost["eventRows"][at] == -1, "the engine's own"
    assert "Recovering" in {lost["states"][kind] for _, kind, _, _ in spans(lost, "bars")}


def copied(folder: Path, name: str) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_bytes((GOLDEN / path.name).read_bytes())
    return path


def test_a_part_of_a_trace(tmp_path: Path) -> None:
    path = copied(tmp_path, "a_full_house")
    whole, part = viewed(path), viewed(path, first=4, until=9)
    assert part["seqs"] == [4, 9]
    assert names(part["events"]) == names(whole["events"])[4:10]
    assert part["times"][0] == 0
    before = {owner for owner, _, start, stop in spans(whole, "bars") if start < 4 <= stop}
    assert {whole["requests"][row] for row in before} <= set(part["requests"]), "who was there already has a row"


def test_nothing_in_a_trace_becomes_markup_or_script(tmp_path: Path) -> None:
    teller = Teller(Settings(slots=1, max_context=256, chunk=32, block_size=16))
    teller.tell(RequestId(1), Submitted(Job((1, 2, 3), 4)), DeviceFailed("broken", HOSTILE))
    lines = teller.end().splitlines(keepends=True)
    first = json.loads(lines[0]) | {"engine": HOSTILE, "identity": HOSTILE, "config": {"model": HOSTILE}}
    path = tmp_path / f"{HOSTILE.replace('/', '_')}.jsonl"
    path.write_text(json.dumps(first) + "\n" + "".join(lines[1:]))
    out = tmp_path / "out.html"
    write_page(path, out)
    html = out.read_text()
    assert "alert(1)" not in html.replace("&lt;script&gt;alert(1)&lt;_script&gt;&lt;img src=x onerror=alert(1)&gt;", "")
    assert html.count("<script") == 2, "the data and the page's own"
    assert html.count("</script") == 2
    data = data_of(html)
    assert HOSTILE in data["about"]["engine"]
    detail = [column for _, table in data["effects"]["kinds"] for name, column in table.items() if name == "detail"]
    assert any(HOSTILE[:200] in json.dumps(column) for column in detail), "it is shown, as text"


def test_the_page_lets_nothing_through_but_itself(tmp_path: Path) -> None:
    html = build_page(ReadTrace(header(Settings()), Timeline()), "x")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    (script,) = re.findall(r'<script type="module">(.*?)</script>', html, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert f"script-src '{timeline_page.hash_source(script)}'" in policy
    assert f"style-src '{timeline_page.hash_source(style)}'" in policy
    assert not re.findall(r"https?://|url\(|import\s|fetch\(|innerHTML|eval\(", html)


def test_no_token_is_on_the_page(tmp_path: Path) -> None:
    teller = Teller(Settings(slots=1, max_context=256, chunk=32, block_size=16))
    said = 987_654_321
    teller.tell(RequestId(1), Submitted(Job((said, said, said), 1, stop_tokens=(said,))))
    teller.tell(RequestId(1), PrefillAdvanced(2), Decoded((said,)))
    path = tmp_path / "run.jsonl"
    path.write_text(teller.end())
    assert str(said) in path.read_text()
    data = viewed(path)
    assert str(said) not in json.dumps({key: data[key] for key in data if key != "effects"})
    effects = dict(data["effects"]["kinds"])
    assert effects["RunDecode"].pop("token") == {"all": "not shown"}
    assert str(said) not in json.dumps(effects)


def test_a_thousand_requests_are_a_small_page() -> None:
    """Driven by hand: each is answered at once, with its first token."""
    world = make_world(Settings(slots=4, max_context=256, chunk=32, block_size=16))
    timeline, seq = Timeline(), 0

    def happen(request: RequestId, event: Any) -> None:
        nonlocal world, seq
        before, envelope = world, Envelope(seq, seq * 1_234_567, ForRequest(request, event))
        world, outs = advance(before, envelope.happened)
        timeline.observe(envelope, outs, before, world)
        seq += 1

    for number in range(1_000):
        request = RequestId(number)
        happen(request, Submitted(Job((number,), 1)))
        happen(request, Decoded((number,), ns=2000 + number % 77))
    html = build_page(ReadTrace(header(Settings()), timeline), "many")
    data = data_of(html)
    assert data["requests"] == list(range(1_000))
    assert len(data["times"]) == 2_000
    assert [owner for owner, *_ in spans(data, "bars")] == list(range(1_000))
    assert len(html) < 210_000


def test_more_events_than_find_room_are_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(collect_timeline, "MOST_EVENTS", 5)
    data = viewed(copied(tmp_path, "a_full_house"))
    assert len(data["times"]) == 5
    assert re.fullmatch(r"\d+ events after event 4 found no room: --from 5 shows them", data["about"]["trouble"][0])
    monkeypatch.setattr(timeline_page, "MOST_BYTES", 1000)
    assert main(["trace", "view", str(copied(tmp_path, "a_full_house"))]) == 2


def test_a_trace_that_was_cut_short_is_shown_to_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(tmp_path, "a_full_house")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-4]))
    assert main(["replay", str(path)]) == 3
    replayed = capsys.readouterr().err
    assert main(["trace", "view", str(path)]) == 3
    shown = capsys.readouterr()
    assert shown.err == replayed
    data = data_of(path.with_suffix(".html").read_text())
    assert data["about"]["trouble"] == [replayed.strip()]
    assert len(data["times"]) > 3
    assert -1 in data["bars"]["took"], "who was there at the end is shown to it"


@pytest.mark.parametrize("damage", ["{bad\n", '{"is":"Nonsense"}\n', '{"is":"Digest"}\n'])
def test_a_damaged_trace_is_shown_up_to_the_damage(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(tmp_path, "a_full_house")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:9], damage]))
    assert main(["trace", "view", str(path)]) == 2
    shown = capsys.readouterr().err
    assert "line 10" in shown
    assert "Traceback" not in shown
    assert data_of(path.with_suffix(".html").read_text())["about"]["trouble"] == [shown.strip()]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'{{"trace":{VERSION - 1}}}\n', f"no trace header of version {VERSION} (found '{VERSION - 1}')"),
        ("", "no trace header"),
        (STORIES["a_full_house"]().splitlines(keepends=True)[0] + "{bad\n", "nothing to show: line 2"),
        (STORIES["a_full_house"]().splitlines(keepends=True)[0], "nothing to show: the trace was cut short"),
    ],
)
def test_what_is_no_trace_is_one_line(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text(text)
    assert main(["trace", "view", str(path)]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert not path.with_suffix(".html").exists()


def test_where_the_page_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(tmp_path, "a_full_house")
    assert main(["trace", "view", str(path)]) == 0
    assert (tmp_path / "a_full_house.html").exists()
    assert main(["trace", "view", str(path), "-o", str(path)]) == 2
    assert "is the trace itself" in capsys.readouterr().err
    assert main(["trace", "view", str(path), "-o", str(tmp_path / "no" / "out.html")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["trace", "view", str(path), "--from", "9999"]) == 2
    assert "nothing to show: no event from 9999 on" in capsys.readouterr().err


def test_times_that_cannot_be_are_shown_in_order() -> None:
    world, timeline = make_world(Settings()), Timeline()
    for seq, at_ns in enumerate((10**9, 5, 10**40, 7)):
        event = ForRequest(RequestId(seq), Submitted(Job((1, 2), 1)))
        after, outs = advance(world, event)
        timeline.observe(Envelope(seq, at_ns, event), outs, world, after)
        world = after
    assert timeline.times == [0, 0, collect_timeline.MOST_US, collect_timeline.MOST_US]


def test_prefill_of_a_neighbour_is_in_the_launch_that_it_was_in(tmp_path: Path) -> None:
    teller = Teller(Settings(slots=2, max_context=256, chunk=32, block_size=16))
    outs = teller.tell(RequestId(1), Submitted(Job(tuple(range(40)), 4)))
    assert any(isinstance(out, Launch) and isinstance(out.effect_requests[0].effect, RunPrefill) for out in outs)
    teller.tell(RequestId(2), Submitted(Job((1, 2), 2)))
    path = tmp_path / "open.jsonl"
    path.write_text("\n".join(teller.lines) + "\n")
    written_ = write_page(path)
    assert "cut short" in written_.trouble
    data = data_of(path.with_suffix(".html").read_text())
    assert spans(data, "launches")[-1][3] == len(data["times"]) - 1, "still under way at the end"
