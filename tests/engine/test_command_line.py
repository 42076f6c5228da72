"""Every command has help with examples that are right, completion in every shell, and colours only on a terminal."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

import engine
from engine.__main__ import main
from engine.commands import app
from tests.cache_command.test_cache import FIRST, fill
from tests.engine.stories import GOLDEN
from tests.importing import importing
from tests.pairs import with_first

ROOT = Path(__file__).parents[2]


def commands(of: App, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    yield path, of
    for name in of:
        if not name.startswith("-"):
            yield from commands(of[name], (*path, name))


COMMANDS = dict(commands(app))


def shown(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*path, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_has_examples_that_the_command_line_takes(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text, command = shown(path, capsys).partition("╭")[0], " ".join(["rekindle", *path])
    paragraphs = [one for one in re.split(r"\n\s*\n", text) if one.startswith(command)]
    examples = [shlex.split(re.split(" [<>] ", one)[0]) for one in paragraphs]
    assert examples, text
    for words in examples:
        if words[-1] != "--help":
            app.parse_args(words[1:], exit_on_error=False, print_error=False)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rekindle {engine.__version__}\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ZSH", "ZSH_CUSTOM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@with_first("shell")
@pytest.mark.parametrize(
    ("shell", "script", "startup"),
    [
        ("bash", ".local/share/bash-completion/completions/rekindle", ".bashrc"),
        ("zsh", ".zsh/completions/_cyclopts_rekindle", ".zshrc"),
        ("fish", ".config/fish/completions/rekindle.fish", None),
    ],
)
def test_one_command_has_a_shell_complete_ours(
    shell: str, script: str, startup: str | None, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2 if shell == "bash" else 1):  # making a script takes half a second
        assert main(["completion", shell]) == 0
    assert str(home / script) in capsys.readouterr().out
    written = (home / script).read_text()
    assert all(path[0] in written for path in COMMANDS if path)
    assert "slots" in written
    if startup is not None:
        assert (home / startup).read_text().count(str((home / script).parent)) in (1, 2)
    assert main(["completion", shell, "--show"]) == 0
    assert capsys.readouterr().out.strip() == written.strip()


def test_bash_completes_commands_options_and_values(home: Path) -> None:
    assert main(["completion", "bash"]) == 0
    script = """
        source ~/.bashrc
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        _rekindle
        printf '%s\\n' "${COMPREPLY[@]}"
    """

    def completed(*words: str) -> set[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", script, "bash", "rekindle", *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )
        return {word.strip() for word in done.stdout.split()}

    assert {"serve", "simulate"} <= completed("s")
    assert "--slots" in completed("serve", "--sl")
    assert completed("serve", "--log-format", "j") == {"json"}


def test_a_shell_that_is_none_of_these_is_told(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.settings.completion.detect_shell", lambda: "powershell")
    assert main(["completion"]) == 2
    assert "accepted: bash, zsh, fish" in capsys.readouterr().err
    assert main(["completion", "tcsh"]) == 2
    assert not list(home.iterdir())


def on_a_terminal(**more: str) -> str:
    """Return the text that `rekindle --help` writes to a terminal."""
    ours, theirs = pty.openpty()
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment = {**plain, **importing(ROOT), "TERM": "xterm-256color", **more}
    with subprocess.Popen([sys.executable, "-m", "engine", "--help"], stdout=theirs, env=environment, cwd=ROOT) as run:
        os.close(theirs)
        text = b""
        try:
            while piece := os.read(ours, 1 << 16):
                text += piece
        except OSError:  # so it shows that the other side has closed
            pass
        assert run.wait(30) == 0
    os.close(ours)
    return text.decode()


COLOUR = re.compile(r"\x1b\[[\d;]*3\d[\d;]*m")


def test_colours_are_for_terminals_that_want_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert COLOUR.search(on_a_terminal())
    assert not COLOUR.search(on_a_terminal(NO_COLOR="1"))
    assert "\x1b" not in shown((), capsys)


# Each start of a command takes seconds.
ANSWERED = (
    *("cache ls CACHE --json", "--help"),
    *(
        pytest.param(line, marks=pytest.mark.long)
        for line in (
            *("models", "models --json", "cache ls CACHE", "replay TRACE", "replay TRACE --until 5"),
            *("doctor --json", "diagram"),
        )
    ),
)


@pytest.mark.parametrize("line", ANSWERED)
def test_a_reader_that_leaves_ends_a_command_as_it_ends_other_tools(line: str, tmp_path: Path) -> None:
    """`| head`: no traceback, and the exit status that shells tell of SIGPIPE."""
    if "CACHE" in line:
        fill(tmp_path / "kv", FIRST)
    words = line.replace("CACHE", str(tmp_path / "kv")).replace("TRACE", str(GOLDEN / "a_full_house.jsonl")).split()
    ours, theirs = os.pipe()
    os.close(ours)
    unbuffered = {"PYTHONUNBUFFERED": "1"} if "--json" in words else {}  # then the first line finds the pipe broken
    environment = {**os.environ, **importing(ROOT), "HOME": str(tmp_path), **unbuffered}
    command = [sys.executable, "-m", "engine", *words]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(theirs)
    assert done.returncode == 141, done.stderr
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


def test_another_pipe_that_breaks_is_no_reader_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("engine.commands.carry_out", broken)
    with pytest.raises(BrokenPipeError):
        main(["models"])
