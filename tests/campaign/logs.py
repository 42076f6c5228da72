"""Traces and request logs from outside: whatever is in them, replay and simulate take it or refuse it in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import zstandard

from effects.scope import Scope
from engine.core.replay import ReplayDiffers, replay_file
from engine.core.trace import BadTrace
from engine.settings.user_error import UserError
from engine.tools.simulate import build_setup, run_scopes
from engine.tools.simulation.logs.read_log import Logs, read_logs
from engine.tools.simulation.simulate_scope import Setup
from engine.tools.simulation.simulation_options import SimulatedPolicies, SimulationOptions
from engine.tools.timeline.timeline_page import write_page
from tests.campaign.case import Case
from tests.campaign.damage import BYTES
from tests.campaign.damage import spoilt as damaged
from tests.campaign.hostile import VALUES, spoilt, spoilt_bytes, text_of

GOLDEN = {file.stem: file.read_text().splitlines() for file in (Path(__file__).parents[1] / "golden").glob("*.jsonl")}
SMALL = tuple(value for value in VALUES if value != 2**31)  # of counts that may be as large as that: no hour's work
COUNTS: dict[str, Any] = {
    "id": "s",
    "block_size": 4,
    "hash_id_scope": "local",
    "tool_tokens": 5,
    "system_tokens": 2,
    "requests": [
        {"t": 0, "type": "s", "in": 10, "out": 5, "hash_ids": [1, 2]},
        {"t": 3, "type": "subagent", "requests": [{"t": 1, "in": 8, "out": 2, "hash_ids": [1, 9]}]},
        {"t": 3.5, "type": "s", "in": 17, "out": 5, "hash_ids": [1, 2, 3, 4], "think_time": 2},
    ],
}
TEXTS = [
    {"timestamp": 1e6, "input": "<|im_start|>user\nHello", "output": "Yes.", "session_id": "s"},
    {"timestamp": 2e6, "input": "<|im_start|>user\nHello again", "output": "Yes.", "session_id": "s"},
]


def simulated(path: Path) -> None:
    """Read, and run as far as it is short."""
    wanted = SimulationOptions(policies=SimulatedPolicies(min_tokens=4))
    try:
        logs = read_logs([path])
        setup = build_setup(wanted.policies, wanted.server, logs)
    except UserError as refusal:
        said = str(refusal)
    else:
        said = ""
        short(setup, logs)
    assert "\n" not in said
    assert len(said) < 1000


def short(setup: Setup, logs: Logs) -> None:
    total = sum(request.length for one in logs.sessions for agent in one.agents for request in agent.requests)
    if total < 20_000 and setup.settings.chunk >= 4:
        run_scopes(setup, logs, (Scope("full"), Scope("auto", 3)))


def replayed(path: Path) -> None:
    said = ""
    try:
        replay_file(path)
    except (BadTrace, ReplayDiffers) as error:
        said = str(error)
    assert len(said) < 3000


def viewed(path: Path) -> None:
    """A page of what can be read, whose trouble is the one that a replay tells; or none, in one line."""
    page = path.with_suffix(".html")
    page.unlink(missing_ok=True)
    refused = ""
    try:
        trouble = write_page(path, page).trouble
    except (BadTrace, UserError) as error:
        trouble, refused = "", str(error)
    assert "\n" not in refused
    assert len(trouble) < 3000
    assert page.exists() is not bool(refused)
    assert refused or page.read_text().count("<script") == 2


@contextmanager
def trace_lines(folder: Path) -> Iterator[Case]:
    path = folder / "t.jsonl"

    def check(random: Random) -> None:
        lines = list(GOLDEN[random.choice(sorted(GOLDEN))])
        for _ in range(random.randint(1, 2)):
            at = random.choice((0, random.randrange(len(lines))))
            lines[at] = text_of(spoilt(json.loads(lines[at]), random))
        path.write_text("\n".join(lines) + "\n")
        replayed(path)
        viewed(path)
        simulated(path)

    yield check


@contextmanager
def trace_bytes(folder: Path) -> Iterator[Case]:

    def check(random: Random) -> None:
        raw = "\n".join(GOLDEN[random.choice(sorted(GOLDEN))]).encode() + b"\n"
        packed = random.random() < 0.5
        path = folder / ("t.jsonl.zst" if packed else "t.jsonl")
        raw = zstandard.compress(raw) if packed else raw
        harm = random.choice(("spoil", *BYTES))
        path.write_bytes(spoilt_bytes(raw, random) if harm == "spoil" else damaged(raw, b"{}\n", harm, random))
        replayed(path)
        viewed(path)
        simulated(path)

    yield check


@contextmanager
def logs_of_counts(folder: Path) -> Iterator[Case]:
    path = folder / "s.json"

    def check(random: Random) -> None:
        raw = text_of(spoilt(COUNTS, random, SMALL)).encode()
        path.write_bytes(spoilt_bytes(raw, random) if random.random() < 0.2 else raw)
        simulated(path)

    yield check


@contextmanager
def logs_of_texts(folder: Path) -> Iterator[Case]:
    path = folder / "l.jsonl"

    def check(random: Random) -> None:
        raw = "".join(text_of(spoilt(line, random)) + "\n" for line in TEXTS).encode()
        path.write_bytes(spoilt_bytes(raw, random) if random.random() < 0.2 else raw)
        simulated(path)

    yield check
