"""`rekindle chat` with our HTTP edge before a fake engine, with a server that is none of ours, and with a real one."""

from __future__ import annotations

import builtins
import io
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import anyio
import httpx2
import pytest
from rich.console import Console

from engine.__main__ import main
from engine.settings.user_error import UserError
from engine.tools.chat import find_server as peers
from engine.tools.chat.find_server import list_served_models, start_server, stop_at_exit
from tests.bench_command.foreign import Foreign, foreign
from tests.http.conftest import Site, served
from tests.text import small

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a home without a history, and no keys."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("OPENAI_API_KEY", "REKINDLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with served(small.write(tmp_path_factory.mktemp("model"))) as site:
        yield site


@pytest.fixture
def other() -> Iterator[Foreign]:
    with foreign() as server:
        yield server


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def typing(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """So much is typed, then Ctrl-D."""
    coming = iter(lines)

    def line(_: str) -> str:
        word = next(coming, EOFError)
        if isinstance(word, str):
            return word
        raise word

    monkeypatch.setattr(sys, "stdin", Tty())
    monkeypatch.setattr(builtins, "input", line)


def piping(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


async def chat(site: Site, *words: str) -> int:
    """Beside the server's own event loop."""
    return await anyio.to_thread.run_sync(partial(main, ["chat", "--url", str(site.client.base_url), *words]))


async def test_a_prompt_from_a_pipe_is_answered_and_that_is_all(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piping(monkeypatch, "Name a bird.\nOne.\n")
    site.say("A *sparrow*.")
    assert await chat(site, "--system", "Be brief.", "--temperature", "0", "--max-tokens", "50") == 0
    assert capsys.readouterr() == ("A *sparrow*.\n", "")
    job = site.door.tickets[0].job
    prompt = site.text.tokenizer.decode(job.prompt, special=True)
    assert prompt.index("Be brief.") < prompt.index("Name a bird.\nOne.<")
    assert (job.sampling.temperature, job.max_tokens) == (0, 50)


async def test_a_conversation_goes_on_and_can_be_kept_and_cleared(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    kept = home / "talk.json"
    lines = ["First", "Second", f"/save {kept}", "/clear", "Third", f"/load {kept}", "Fourth", "/nonsense", "/help", ""]
    typing(monkeypatch, *lines, KeyboardInterrupt, '"""two', 'lines"""')
    site.say("Sparrow.")
    assert await chat(site) == 0
    prompts = [site.text.tokenizer.decode(ticket.job.prompt) for ticket in site.door.tickets]
    there = [[word for word in ("First", "Second", "Third", "Fourth") if word in prompt] for prompt in prompts]
    assert there[:4] == [["First"], ["First", "Second"], ["Third"], ["First", "Second", "Fourth"]]
    assert "two\nlines" in prompts[4]
    assert prompts[1].count("Sparrow.") == 1
    out, err = capsys.readouterr()
    assert out.count("Sparrow.") == 5
    assert re.search(r"\d+ tokens, [\d.]+ tokens/s, first after [\d.]+ s, \d+ of \d+ prompt tokens restored", out)
    assert "4 messages kept in" in out.replace("\n", " ")
    assert "/save FILE" in out
    assert err == "rekindle: /nonsense is not a command; accepted: /save, /load, /clear, /help\n"


async def test_what_was_restored_and_from_where_is_told(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.say("Sparrow.")
    typing(monkeypatch, "Name a bird.", "/clear", "Name a bird.")
    assert await chat(site) == 0
    first, second = re.findall(r"([\d,]+) of ([\d,]+) prompt tokens restored( from \w+)?", capsys.readouterr().out)
    assert int(second[0]) > int(first[0])
    assert second[2] == " from device"


async def test_an_answer_that_fails_is_told_and_no_part_of_the_conversation(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.door.fail_after = 0
    piping(monkeypatch, "Name a bird.")
    assert await chat(site) == 1
    assert "rekindle: in the stream: The engine could not finish" in capsys.readouterr().err
    typing(monkeypatch, "Name a fish.")
    assert await chat(site) == 0
    assert "rekindle: in the stream: The engine could not finish" in capsys.readouterr().err


@pytest.mark.parametrize(("model", "expected"), [("counts", "10 of 40 prompt tokens restored"), ("plain", "4 tokens")])
def test_any_server_will_do(
    model: str, expected: str, other: Foreign, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    typing(monkeypatch, "Hi")
    assert main(["chat", model, "--url", f"{other.url}/v1/"]) == 0
    out = capsys.readouterr().out
    assert expected in out
    assert "secret" not in out
    body = other.bodies[0]
    assert (body["key"], body["model"], body["messages"]) == (
        "Bearer secret",
        model,
        [{"role": "user", "content": "Hi"}],
    )


@pytest.mark.parametrize(("model", "expected"), [("fails", "out of memory"), ("garbage", "an event that is none")])
def test_what_a_server_does_wrong_is_one_line(
    model: str, expected: str, other: Foreign, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piping(monkeypatch, "Hi")
    assert main(["chat", model, "--url", other.url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_nobody_there_nothing_said_and_a_wrong_key_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piping(monkeypatch, "Hi")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        assert main(["chat", "--url", f"http://127.0.0.1:{taken.getsockname()[1]}"]) == 2
    assert "no server answers there" in capsys.readouterr().err
    piping(monkeypatch, " \n")
    assert main(["chat"]) == 2
    assert "no prompt" in capsys.readouterr().err
    assert main(["chat", "--url", "ftp://x"]) == 2
    assert "http://127.0.0.1:8000" in capsys.readouterr().err


async def test_a_key_that_is_missing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(small.write(tmp_path), api_keys=("secret",)) as site:
        site.say("Sparrow.")
        piping(monkeypatch, "Hi")
        assert await chat(site) == 2
        assert "the key in the environment is missing or wrong" in capsys.readouterr().err
        monkeypatch.setenv("REKINDLE_API_KEY", "secret")
        piping(monkeypatch, "Hi")
        assert await chat(site) == 0


async def test_ours_is_asked_where_it_runs_and_has_the_model(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[str]()
    site.say("Sparrow.")

    def refusing(model: str, _: Console) -> None:
        asked.append(model)
        raise UserError("started")

    monkeypatch.setattr(peers, "OURS", str(site.client.base_url))
    monkeypatch.setattr(peers, "start_server", refusing)
    for words, status in (([], 0), (["some/folder/small"], 0), (["large"], 2)):
        piping(monkeypatch, "Hi")
        assert await anyio.to_thread.run_sync(main, ["chat", *words]) == status
    assert asked == ["large"]


def test_a_server_is_started_for_the_conversation_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_DISK_PREFIX_CACHE", "off")
    console = Console(file=io.StringIO())
    with start_server("demo", console) as url:
        assert list_served_models(url, "") == ["demo"]
    with pytest.raises(httpx2.HTTPError):
        httpx2.get(f"{url}/health", trust_env=False)
    with pytest.raises(UserError, match="/nowhere: no such folder"), start_server("/nowhere", console):
        pass


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_terminal_that_is_closed_ends_what_was_started(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as left, stop_at_exit():
        signal.raise_signal(number)
    assert left.value.code == 128 + number
    assert signal.getsignal(number) == before
