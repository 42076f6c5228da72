"""Tests of what is typed and what it means, and of a conversation in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.settings.user_error import UserError
from engine.tools.chat.chat_options import ChatOptions
from engine.tools.chat.conversation_file import Command, Message, TypedConversation, parse_command, read_prompt


def typed(*lines: str) -> str:
    """Return the message that is read from these typed lines."""
    coming: Iterator[str] = iter(lines)

    def line(_: str) -> str:
        try:
            return next(coming)
        except StopIteration:
            raise EOFError from None

    return read_prompt(line)


@pytest.mark.parametrize(
    ("lines", "prompt"),
    [
        (["  Hello "], "Hello"),
        ([""], ""),
        (["two\nlines that were pasted"], "two\nlines that were pasted"),
        (['"""', "def f():", "    return 1", '"""'], "def f():\n    return 1"),
        (['"""one', 'two"""  '], "one\ntwo"),
        (['"""at once"""'], "at once"),
    ],
)
def test_a_prompt_is_a_line_or_what_stands_between_marks(lines: list[str], prompt: str) -> None:
    assert typed(*lines) == prompt


@pytest.mark.parametrize("lines", [[], ['"""', "never ended"]])
def test_a_prompt_that_does_not_come_is_the_end(lines: list[str]) -> None:
    with pytest.raises(EOFError):
        typed(*lines)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/save my talk.json ", Command("save", "my talk.json")),
        ("/load x", Command("load", "x")),
        ("/clear", Command("clear")),
        ("/help", Command("help")),
        ("Hello", None),
        ("", None),
        ("/etc/passwd: what is that?", None),
        ("/usr", "accepted: /save, /load, /clear, /help"),
        ("/save", "accepted: /save FILE"),
        ("/clear now", "accepted: /clear"),
    ],
)
def test_commands(line: str, command: Command | str | None) -> None:
    if isinstance(command, str):
        with pytest.raises(UserError, match=command):
            parse_command(line)
    else:
        assert parse_command(line) == command


def test_a_conversation_is_sent_whole() -> None:
    talk = TypedConversation("Be brief.")
    talk.add_turn("Hi", "Hello.")
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    assert talk.build_messages("And?") == [
        system,
        first,
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And?"},
    ]
    talk.clear()
    assert talk.build_messages("Hi") == [system, first]


def test_a_conversation_comes_back_from_its_file(tmp_path: Path) -> None:
    talk, other = TypedConversation("Be brief."), TypedConversation()
    talk.add_turn("Hi", "Grüß Gott.")
    for _ in range(2):
        talk.save(tmp_path / "talk.json")
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]
    other.load(tmp_path / "talk.json")
    assert other == talk
    assert json.loads((tmp_path / "talk.json").read_text())["messages"][2]["content"] == "Grüß Gott."
    TypedConversation(messages=[Message("user", "a"), Message("assistant", "b")]).save(tmp_path / "plain.json")
    other.load(tmp_path / "plain.json")
    assert (other.system, len(other.messages)) == ("", 2)


@pytest.mark.parametrize("text", ["my thesis", "{}", '{"messages": []}', '{"messages": [{"role": "user"}]}', "\xff"])
def test_a_file_of_something_else_is_neither_read_nor_overwritten(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text, "latin-1")
    talk = TypedConversation()
    talk.add_turn("Hi", "Hello.")
    for do in (talk.save, talk.load):
        with pytest.raises(UserError, match="no conversation"):
            do(tmp_path / "file")
    assert (tmp_path / "file").read_text("latin-1") == text
    assert len(talk.messages) == 2


@pytest.mark.parametrize(
    ("url", "environment", "key"),
    [
        ("", {}, ""),
        ("", {"OPENAI_API_KEY": "theirs"}, ""),
        ("", {"REKINDLE_API_KEY": "ours other", "OPENAI_API_KEY": "theirs"}, "ours"),
        ("http://x", {"REKINDLE_API_KEY": "ours", "OPENAI_API_KEY": "theirs"}, "theirs"),
        ("http://x", {"REKINDLE_API_KEY": "ours"}, "ours"),
    ],
)
def test_a_key_goes_to_the_server_that_it_is_for(url: str, environment: dict[str, str], key: str) -> None:
    assert ChatOptions(url=url).choose_key(environment) == key
