"""Tests that the content of a log shows its format, that it is read as sessions of agents, and that a fault is one line
with its place.
"""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard

from engine.settings.user_error import UserError
from engine.tools.simulation.logs import claude_code
from engine.tools.simulation.logs.logged_requests import Request
from engine.tools.simulation.logs.read_log import PIECE, Logs, read_logs

GOLDEN = Path(__file__).parents[1] / "golden"


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def requests(logs: Logs, session: int = 0, agent: int = 0) -> tuple[Request, ...]:
    return logs.sessions[session].agents[agent].requests


def counts(t: float, length: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "s", "in": length, "out": 5, "hash_ids": ids, **more}


def session(*listed: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "s", "block_size": 4, "tool_tokens": 5, "system_tokens": 2, "requests": list(listed), **more}


# --- token counts ---


def test_equal_ids_are_equal_blocks_within_a_session_and_only_there(tmp_path: Path) -> None:
    one = write(tmp_path / "one.json", session(counts(0, 10, [1, 2]), counts(3.5, 17, [1, 2, 3, 4], think_time=2)))
    two = write(tmp_path / "two.json", session(counts(0, 8, [1, 2]), id="other"))
    logs = read_logs([one, two])
    first, second = requests(logs)
    assert [first.length, second.length, len(second.answer)] == [10, 17, 5]
    assert first.prompt[:8] == second.prompt[:8]
    assert first.prompt[8:] != second.prompt[8:10], "what no hash covers occurs nowhere else"
    assert (second.at_ns, second.pause_ns) == (3_500_000_000, 2_000_000_000)
    (other,) = requests(logs, 1)
    assert other.prompt[:4] != first.prompt[:4]
    assert requests(read_logs([one]))[0].prompt == first.prompt, "always the same"


def test_ids_of_global_scope_are_equal_in_all_sessions(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{name}.json", session(counts(0, 8, [1, 2]), id=name, hash_id_scope="global"))
        for name in ("a", "b")
    ]
    logs = read_logs(paths)
    assert requests(logs, 0)[0].prompt == requests(logs, 1)[0].prompt


def test_a_shared_head_is_shared_only_when_asked_for_and_as_far_as_the_session_keeps_it(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{name}.json", session(counts(0, 12, [1, 2, 3]), counts(1, 12, [1, 9, 3]), id=name))
        for name in ("a", "b")
    ]
    apart = read_logs(paths)
    assert requests(apart, 0)[0].prompt[:7] != requests(apart, 1)[0].prompt[:7]
    logs = read_logs(paths, shared_head=True)
    first, second = requests(logs, 0)
    assert first.prompt[:7] == requests(logs, 1)[0].prompt[:7]
    assert first.prompt[7:12] != requests(logs, 1)[0].prompt[7:12]
    assert first.prompt[:4] == second.prompt[:4]
    assert first.prompt[4:7] != second.prompt[4:7], "this request begins otherwise"
    assert first.length == second.length == 12


def test_messages_begin_after_the_head_and_where_earlier_prompts_ended(tmp_path: Path) -> None:
    turns = session(counts(0, 10, [1, 2]), counts(1, 15, [1, 2, 3]), counts(2, 16, [1, 7, 3, 4]))
    first, second, third = requests(read_logs([write(tmp_path / "s.json", turns)]))
    assert first.boundaries == (5, 7, 10)
    assert second.boundaries == (5, 7, 10, 15)
    assert third.boundaries == (5, 7, 16), "it does not begin as the others do"


def test_subagents_are_agents_of_their_own_in_time(tmp_path: Path) -> None:
    inner = [counts(0, 8, [1, 8]), counts(20, 12, [1, 8, 9])]
    outer = session(counts(0, 8, [1, 2]), {"t": 10, "type": "subagent", "requests": inner}, counts(30, 12, [1, 2, 3]))
    logs = read_logs([write(tmp_path / "s.json", outer)])
    (one,) = logs.sessions
    times = [[request.at_ns // 10**9 for request in agent.requests] for agent in one.agents]
    assert sorted(times) == [[0, 30], [10, 20]], "counted from its own start, or from the session's"
    child, parent = one.agents
    assert child.requests[0].prompt[:4] == parent.requests[0].prompt[:4], "one session, so equal ids are equal blocks"


# --- texts ---


def line(at: float, text: str, answer: str = "Yes.", session: str = "s") -> dict[str, Any]:
    return {"timestamp": at, "input": text, "output": answer, "session_id": session}


def test_texts_are_sessions_by_id_in_order_of_time_and_begin_alike(tmp_path: Path) -> None:
    texts = ["You are an agent.", "You are an agent. Go on, please."]
    path = write(tmp_path / "l.jsonl", line(2e6, texts[1]), line(5e6, "Other", session="o"), line(1e6, texts[0]))
    logs = read_logs([path])
    assert [one.name for one in logs.sessions] == ["s", "o"]
    first, second = requests(logs)
    assert (first.at_ns, second.at_ns) == (10**9, 2 * 10**9)
    assert second.prompt[: first.length] == first.prompt
    assert first.length in second.boundaries
    assert logs.texts == "the demo's tokenizer"
    assert logs.sessions[0].absolute


@pytest.mark.parametrize(
    "opening",
    ["<|im_start|>user\n", "<|start_header_id|>user<|end_header_id|>\n\n", "\nUser: ", "[INST]", "\n### User:\n"],
)
def test_messages_begin_behind_role_markers(tmp_path: Path, opening: str) -> None:
    path = write(tmp_path / "l.jsonl", line(0, f"Some words{opening}Hello"), line(1, f"Some words{opening}"))
    with_more, without = requests(read_logs([path]))
    (at, end) = with_more.boundaries
    assert end == with_more.length
    assert abs(at - without.length) <= 1, "just past the marker, but for a token that reaches over its end"


# --- recorded ---


def test_a_recorded_trace_gives_jobs_answers_and_settings() -> None:
    logs = read_logs([GOLDEN / "a_turn_and_its_continuation.jsonl"])
    first, second = requests(logs)
    assert second.prompt[: first.length + len(first.answer)] == first.prompt + first.answer, "a continued turn"
    assert logs.settings is not None
    assert len(logs.sessions[0].agents) == 1, "who goes on from an answer has waited for it"


@pytest.mark.parametrize("kind", ["recorded", "texts", "counts"])
def test_any_file_may_be_compressed(tmp_path: Path, kind: str) -> None:
    plain = {
        "recorded": GOLDEN / "a_full_house.jsonl",
        "texts": write(tmp_path / "l.jsonl", line(0, "Hello"), line(1, "Hello again")),
        "counts": write(tmp_path / "s.json", session(counts(0, 8, [1, 2]))),
    }[kind]
    packed = tmp_path / (plain.name + ".zst")
    packed.write_bytes(zstandard.ZstdCompressor().compress(plain.read_bytes()))
    there, again = requests(read_logs([plain])), requests(read_logs([packed]))
    assert [one.prompt for one in there] == [one.prompt for one in again]


# --- what is wrong ---


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: no JSON"),
        ("hello\n", "line 1: no JSON"),
        ("[1, 2]\n", "unknown format"),
        ('{"a": 1}\n', "unknown format"),
        ('{"trace": 99}\n', "line 1 is no trace header"),
        ('{"requests": 3}', '"requests" is no list'),
        ('{"requests": []}', "no requests"),
        ('{\n"requests": [\n{"in": }]}', "line 3: no JSON"),
        ('{"requests": [{"t": 0, "in": 0}]}', 'request 0: "in" is 0; accepted'),
        ('{"requests": [{"t": 0, "in": 99999999999}]}', 'request 0: "in" is 99999999999; accepted'),
        ('{"requests": [{"t": -1, "in": 5}]}', 'request 0: "t" is -1; accepted'),
        ('{"requests": [{"t": 0, "in": 5, "hash_ids": ["x"]}]}', 'request 0: "hash_ids"'),
        ('{"requests": [{"t": 0, "in": 5}], "block_size": 0}', '"block_size" is 0; accepted'),
        ('{"requests": [{"t": 0, "in": 5}], "hash_id_scope": "x"}', "accepted: local, global"),
        ('{"requests": [{"t": 0, "in": 5}], "hash_id_scope": []}', "accepted: local, global"),
        ('{"requests": [{"t": [[1]], "in": 5}]}', '"t" is a JSON list; accepted'),
        ('{"requests": [{"t": 0, "in": 5}], "id": "\\ud800"}', "surrogate"),
        ('{"timestamp": 0, "input": "a", "session_id": "\\ud800"}\n', "line 1: half a surrogate pair"),
        ('{"timestamp": 0, "input": "a", "output": "\\udfff"}\n', "line 1: half a surrogate pair"),
        (
            '{"timestamp": 0, "input": "a"}\n{"timestamp": 0, "x": [' + "[]," * 20_000 + "0]}",
            "line 2: no JSON",
        ),
        ('{"timestamp": 0, "input": "a"}\n{"timestamp": "x", "input": "a"}\n', 'line 2: "timestamp" is x; accepted'),
        ('{"timestamp": 0, "input": "a"}\n{"timestamp": 1, "input": 3}\n', "line 2"),
        ('{"timestamp": 0, "input": ""}\n', "line 1"),
        ('{"timestamp": 0, "input": "a"}\nnot\n', "line 2: no JSON"),
        ('{"timestamp": true, "input": "a"}\n', "line 1"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it_and_the_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(UserError) as refusal:
        read_logs([path])
    assert said in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_a_small_file_cannot_stand_for_more_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claude_code, "MOST_MADE_UP", 10_000)
    path = write(tmp_path / "s.json", session(*(counts(at, 4000, []) for at in range(3))))
    with pytest.raises(UserError, match="stands for more than"):
        read_logs([path])


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    for name, raw in (("a.json", b"\xff\xfe\x00"), ("b.zst", b"no zstd at all")):
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(UserError, match=name):
            read_logs([tmp_path / name])


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(UserError, match="no regular file"):
            read_logs([path])


def test_brackets_in_a_text_are_text(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", line(0, '[{"\\' * 20_000))
    assert requests(read_logs([path]))[0].length > 1000


def test_a_long_text_is_read_in_pieces_that_texts_which_begin_alike_share(tmp_path: Path) -> None:
    words = " ".join(f"word{n}" for n in range(15_000))
    path = write(tmp_path / "l.jsonl", line(0, words), line(1, words + "\nUser: Go on"))
    tracemalloc.start()
    first, second = requests(read_logs([path]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(words) > 4 * PIECE
    assert second.prompt[: first.length - 1] == first.prompt[:-1]
    assert second.boundaries[-2] == second.length - 2
    assert peak < 60 * len(words)


def test_a_prompt_that_goes_back_begins_as_all_do_that_it_began_with(tmp_path: Path) -> None:
    """Two earlier prompts of one length, one with another tail, one that is no beginning of the last turn."""
    turns = [[1], [1, 2], [1, 2, 3], [1, 7], [1, 2, 3, 4], [1, 7, 8]]
    log = session(*(counts(at, 8 * len(ids), ids) for at, ids in enumerate(turns)), block_size=8, tool_tokens=0)
    found = requests(read_logs([write(tmp_path / "s.json", log)]))
    assert found[4].boundaries == (2, 8, 16, 24, 32)
    assert found[5].boundaries == (2, 8, 16, 24)
