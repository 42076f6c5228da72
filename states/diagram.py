"""The transition table as Mermaid text, and as the page docs/STATES.md.

The picture on that page is drawn by `tests/docs/states_picture.py`, so it can be seen without a renderer of Mermaid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from effects.experts import MoveExperts
from effects.ids import RequestId
from effects.pacing import PaceMemory, PaceSnapshot, PaceSteps, TrimMemory
from effects.stream import StopLaunch
from effects.timer import StartTimer
from states.machine import Table
from states.pacing import (
    Demand,
    GatePhase,
    PaceOutput,
    SnapshotGate,
    Trimming,
    TrimPhase,
    decide_trimming,
    move_gate,
)

Edges: TypeAlias = Iterable[tuple[str, str, str]]  # each (from, to, cause)

HEAD = """\
# The states of a request

`make diagram` writes this page and its picture from `states/table.py`. A test compares them with
the table. [ARCHITECTURE.md](../ARCHITECTURE.md) explains the machine around the table.

<picture>
  <source media="(prefers-color-scheme: dark)" srcset="images/states-dark.svg">
  <img alt="The states of a request and the events between them" src="images/states-light.svg">
</picture>

A request goes down the middle column. A curve skips phases that have nothing to do, or looks a
prompt up again. A request whose slot lost its rows goes to `Recovering` and waits for a slot again,
once. A request that ends while work is in flight goes to `Draining`, which waits for the outcomes.

Each row of the table is one possible transition. A state and an event that have several rows decide
between them by what the state holds and by the policies in `states/policy.py`. A pair that has no
row is a bug, and the engine stops. `rekindle diagram` prints the same table as a Mermaid diagram.

"""

# Effects that no transition of a request asks for. The world puts them out itself.
WORLD_EFFECTS = (StopLaunch, MoveExperts, PaceSnapshot, PaceSteps, PaceMemory, TrimMemory, StartTimer)
QUIET = 1  # numbers of timers in the examples below
PATIENCE = 2
GATES: Mapping[GatePhase, SnapshotGate] = {
    phase: SnapshotGate(RequestId(1), phase, QUIET if phase == "settling" else 0, PATIENCE)
    for phase in ("giving_way", "settling", "copying")
}
GATE_CAUSES: Mapping[str, tuple[Demand, int]] = {  # the demand then, and the timer that has elapsed
    "a request waits for a slot": (Demand(is_slot_requested=True), 0),
    "a first token is pending": (Demand(first_tokens=1), 0),
    "no first token is pending": (Demand(), 0),
    "snapshot_quiet has elapsed": (Demand(), QUIET),
    "snapshot_patience has elapsed": (Demand(first_tokens=1), PATIENCE),
}
TRIM_CAUSES: Mapping[str, tuple[Demand, int]] = {
    "a request is served": (Demand(is_serving=True), 0),
    "no request is served": (Demand(), 0),
    "the timer has elapsed while a request is served": (Demand(is_serving=True), QUIET),
    "the timer has elapsed while no request is served": (Demand(), QUIET),
}


def list_edges(rows: Table) -> dict[tuple[str, str], list[str]]:
    """Return the names of the events that lead from one state to another, by the names of both states.

    An event that a state ignores is left out.
    """
    edges: dict[tuple[str, str], list[str]] = {}
    for row in rows.values():
        for target, *_ in row.arms:
            if row.arms == ((row.state,),):
                continue
            events = edges.setdefault((row.state.__name__, target.__name__), [])
            if row.event.__name__ not in events:
                events.append(row.event.__name__)
    return edges


def render_mermaid(rows: Table) -> str:
    """Return the picture: one edge for each (state, next state), labelled with its events."""
    edges = list_edges(rows)
    lines = ["stateDiagram-v2", "    [*] --> New"]
    lines += [f"    {start} --> {stop} : {', '.join(events)}" for (start, stop), events in edges.items()]
    return "\n".join([*lines, "    Done --> [*]"]) + "\n"


def list_gate_edges() -> Iterator[tuple[str, str, str]]:
    """Yield how the gate of a snapshot moves, as `states/pacing.py` decides it."""
    for phase, gate in GATES.items():
        for cause, (demand, timer) in GATE_CAUSES.items():
            moved = move_gate(gate, demand, timer, PaceOutput(PATIENCE))
            if moved.phase != phase and timer in {0, gate.quiet_timer, gate.patience_timer}:
                yield phase, moved.phase, cause


def list_trim_edges() -> Iterator[tuple[str, str, str]]:
    """Yield how the trimming of memory moves, as `states/pacing.py` decides it."""
    phases: tuple[TrimPhase, ...] = ("rested", "counting", "due")
    for phase in phases:
        before = Trimming(phase, 0 if phase == "rested" else QUIET)
        for cause, (demand, timer) in TRIM_CAUSES.items():
            after = decide_trimming(before, demand, timer, output := PaceOutput(PATIENCE))
            is_possible = demand.is_serving or timer == 0 or phase == "counting"  # memory is not due in an idle server
            if after != before and timer in {0, before.timer} and is_possible:
                trims = any(isinstance(effect_request.effect, TrimMemory) for effect_request in output.effects)
                yield phase, after.phase, f"{cause}{' (`TrimMemory`)' if trims else ''}"


def render_markdown(rows: Table) -> str:
    """Return docs/STATES.md: the picture, every arm of every row with its effects, and what the world does itself."""
    lines = [
        *HEAD.splitlines(),
        "| in state | sees | goes to | asking, in order |",
        "|---|---|---|---|",
    ]
    for row in rows.values():
        for target, *effects in row.arms:
            asked = ", ".join(f"`{effect.__name__}`" for effect in effects) or "nothing"
            lines.append(f"| {row.state.__name__} | {row.event.__name__} | {target.__name__} | {asked} |")
    return "\n".join([*lines, *render_world()]) + "\n"


def render_world() -> Iterator[str]:
    """Yield the lines about effects that no transition of a request asks for."""
    yield from (
        "",
        "## What the world asks for itself",
        "",
        "No transition of a request asks for these effects. `states/world.py` and `states/pacing.py` put them",
        "out when what all requests want together has changed, or when a timer has elapsed",
        "(`TimerElapsed`).",
        "",
        "| effect | what it asks for |",
        "|---|---|",
    )
    for effect in WORLD_EFFECTS:
        summary = " ".join((effect.__doc__ or "").split("\n\n")[0].split())
        yield f"| `{effect.__name__}` | {summary} |"
    yield from (
        "",
        "This is the gate of the snapshot that is being taken. It may copy its next run while it is",
        "`copying`.",
        "",
        *render_moves(list_gate_edges()),
        "",
        "Free memory goes back to the system with `TrimMemory`:",
        "",
        *render_moves(list_trim_edges()),
    )


def render_moves(edges: Edges) -> Iterator[str]:
    """Yield a table of the moves of something that is no request, with all causes of each."""
    causes: dict[tuple[str, str], list[str]] = {}
    for start, stop, cause in edges:
        causes.setdefault((start, stop), []).append(cause)
    yield from ("| from | to | because |", "|---|---|---|")
    yield from (f"| `{start}` | `{stop}` | {'; or '.join(because)} |" for (start, stop), because in causes.items())
