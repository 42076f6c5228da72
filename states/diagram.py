"""The transition table as Mermaid text, and as the page docs/STATES.md.

The picture on that page is drawn by `tests/docs/states_picture.py`, so it can be seen without a renderer of Mermaid.
"""

from __future__ import annotations

from states.machine import Table

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


def render_markdown(rows: Table) -> str:
    """Return docs/STATES.md: the picture, then every arm of every row with its effects."""
    lines = [
        *HEAD.splitlines(),
        "| in state | sees | goes to | asking, in order |",
        "|---|---|---|---|",
    ]
    for row in rows.values():
        for target, *effects in row.arms:
            asked = ", ".join(f"`{effect.__name__}`" for effect in effects) or "nothing"
            lines.append(f"| {row.state.__name__} | {row.event.__name__} | {target.__name__} | {asked} |")
    return "\n".join(lines) + "\n"
