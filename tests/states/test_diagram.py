"""The pictures drawn from the table: every edge is in them, and the page in the documents is the one drawn now."""

from __future__ import annotations

from pathlib import Path

from effects.decode import Decoded
from states.diagram import render_markdown, render_mermaid
from states.request_states import Speculating
from states.table import TABLE

ROOT = Path(__file__).parents[2]


def test_every_move_between_two_states_is_an_edge_of_the_picture() -> None:
    lines = render_mermaid(TABLE).splitlines()
    assert (lines[0], lines[-1]) == ("stateDiagram-v2", "    Done --> [*]")
    for row in TABLE.values():
        for target in {arm[0] for arm in row.arms} - {row.state}:
            edge = f"    {row.state.__name__} --> {target.__name__} : "
            (line,) = [line for line in lines if line.startswith(edge)]
            assert row.event.__name__ in line.removeprefix(edge).split(", ")


def test_every_arm_is_a_line_of_the_page() -> None:
    lines = render_markdown({(Speculating, Decoded): TABLE[Speculating, Decoded]}).splitlines()
    assert lines[lines.index("## What the world asks for itself") - 9 :][:8] == [
        "| Speculating | Decoded | Speculating | `EmitTokens`, `RunDecode` |",
        "| Speculating | Decoded | Speculating | `RunDecode` |",
        "| Speculating | Decoded | Speculating | `EmitTokens` |",
        "| Speculating | Decoded | Snapshotting | `EmitTokens`, `CloseStream`, `SaveSnapshot` |",
        "| Speculating | Decoded | Parking | `EmitTokens`, `CloseStream`, `UnloadModel` |",
        "| Speculating | Decoded | Done | `EmitTokens`, `CloseStream` |",
        "| Speculating | Decoded | Parking | `CloseStream`, `UnloadModel` |",
        "| Speculating | Decoded | Done | `CloseStream` |",
    ]


def test_the_page_in_the_documents_is_up_to_date() -> None:
    """`make diagram` draws it again."""
    assert (ROOT / "docs" / "STATES.md").read_text() == render_markdown(TABLE)
