"""Tests of what a terminal shows of an answer: every block once, in order, in whatever pieces it came."""

from __future__ import annotations

import io
import os
import pty
import re
import termios

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from engine.tools.chat.render_answer import PlainView, RenderedView, choose_view, split_settled, without_echo
from tests.examples import count_examples

ANSWER = """# Title

A paragraph
of two lines.

```python
x = 1

y = 2
```

1. one

   of one
2. two

- a
- b

The end."""


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("one", "one"),
        ("one\n\n", "one\n\n"),
        ("one\n\ntw", "one\n\ntw"),
        ("one\n\ntwo\n", "two\n"),
        ("one\n\ntwo\n\nthree\nfour", "three\nfour"),
        ("one\n\n    indented\n", "one\n\n    indented\n"),
        ("1. one\n\n2. two\n", "1. one\n\n2. two\n"),
        ("- one\n\n- two\n\nthree\n", "three\n"),
        ("```\na\n\nb\n", "```\na\n\nb\n"),
        ("```\na\n\nb\n```\n\nc\n", "c\n"),
        ("````\n```\n\na\n````\n\nc\n", "c\n"),
        ("~~~ x\n```\n\na\n", "~~~ x\n```\n\na\n"),
    ],
)
def test_a_block_is_settled_when_nothing_can_change_it(text: str, rest: str) -> None:
    assert text[split_settled(text) :] == rest


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=60, height=20, color_system=None)


def left(console: Console) -> list[str]:
    """The lines that stay: what is drawn anew goes again."""
    assert isinstance(console.file, io.StringIO)
    text = re.sub(r"\x1b\[\?25[lh]", "", console.file.getvalue())
    kept: list[str] = []
    row = 0
    for part in re.split(r"(\x1b\[1A|\x1b\[2K|\r|\n)", re.sub(r"\x1b\[\d*m", "", text)):
        if part == "\x1b[1A":
            row -= 1
        elif part == "\n":
            row += 1
        elif part != "\r":
            kept += [""] * (row + 1 - len(kept))
            kept[row] = "" if part == "\x1b[2K" else kept[row] + part
    return [line.rstrip() for line in kept]


@settings(deadline=None, max_examples=count_examples(20))
@given(st.lists(st.integers(1, len(ANSWER) - 1), max_size=12).map(lambda cuts: sorted({0, *cuts})))
def test_all_of_an_answer_stays_whatever_it_was_cut_in(cuts: list[int]) -> None:
    console = terminal()
    with RenderedView(console) as shown:
        for start, stop in zip(cuts, [*cuts[1:], len(ANSWER)], strict=True):
            shown.show("", ANSWER[start:stop])
    lines = [line.strip("│┃┏┓┗┛━ ") for line in left(console)]
    text_lines = [line for line in lines if line]
    assert text_lines == [
        "Title",
        "A paragraph of two lines.",
        *("x = 1", "y = 2"),
        *("1 one", "of one", "2 two"),
        *("• a", "• b"),
        "The end.",
    ]


def test_what_was_thought_stands_above_the_answer() -> None:
    console = terminal()
    with RenderedView(console) as shown:
        shown.show("Hm, ", "")
        shown.show("well.", "")
        shown.show("", "Yes.")
    assert [line for line in left(console) if line] == ["Hm, well.", "Yes."]


def test_a_pipe_gets_the_answer_alone() -> None:
    console = Console(file=io.StringIO())
    assert isinstance(choose_view(console), PlainView)
    with choose_view(console) as shown:
        for thought, text in (("Hm", ""), ("", "**Yes**"), ("", ", it is")):
            shown.show(thought, text)
    assert console.file.getvalue() == "**Yes**, it is\n"  # type: ignore[attr-defined]
    assert isinstance(choose_view(terminal()), RenderedView)


def test_what_is_typed_beside_an_answer_is_not_shown_and_there_for_the_next_line() -> None:
    """A terminal writes ^C where its cursor is: at the end of a block that is drawn anew."""
    ours, terminal = pty.openpty()
    try:
        before = termios.tcgetattr(terminal)
        with without_echo(terminal):
            os.write(ours, b"typed ahead\n")
            os.write(terminal, b"An answer")
            assert os.read(ours, 100) == b"An answer"
        assert os.read(terminal, 100) == b"typed ahead\n"
        assert termios.tcgetattr(terminal) == before
        with pytest.raises(KeyboardInterrupt), without_echo(terminal):
            raise KeyboardInterrupt
        assert termios.tcgetattr(terminal) == before
    finally:
        os.close(ours)
        os.close(terminal)


def test_what_is_no_terminal_is_left_alone() -> None:
    reading, writing = os.pipe()
    with without_echo(reading):
        os.write(writing, b"piped")
    assert os.read(reading, 100) == b"piped"
    os.close(reading)
    os.close(writing)
