"""`rekindle chat`: answers prompts until Ctrl-D. If standard input is a pipe, it answers one prompt."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import httpx2
from attrs import define
from platformdirs import user_state_path
from rich.console import Console
from rich.text import Text as Line

from engine.settings.output.formatting import format_count
from engine.settings.sse_client import StreamBroken, describe_error
from engine.settings.user_error import UserError, find_innermost
from engine.tools.chat.chat_client import ChatAnswer, ChatPeer
from engine.tools.chat.chat_options import ChatOptions
from engine.tools.chat.conversation_file import COMMANDS, KEYS, Command, TypedConversation, parse_command, read_prompt
from engine.tools.chat.find_server import find_peer
from engine.tools.chat.render_answer import choose_view, without_echo

MOST_HISTORY = 1000  # lines
INTERRUPTED = 130
STANDARD_INPUT = 0  # the descriptor on which a person types


def run_chat(model: str, options: ChatOptions) -> int:
    """Run a conversation and return the exit status, 1 if the answer to a pipe failed. Raises UserError."""
    piped = None if sys.stdin.isatty() else sys.stdin.read()
    if piped is not None and not piped.strip():
        raise UserError("standard input is not a terminal and holds no prompt")
    out = Console()
    err = Console(stderr=True)
    with find_peer(model, options, options.choose_key(os.environ), err) as server:
        chat = ChatSession(server, TypedConversation(options.system), out, err)
        if piped is not None:
            answer = chat.answer(piped.strip())
            return 1 if answer is None else INTERRUPTED if answer.cancelled else 0
        return chat.converse()


@define(eq=False)
class ChatSession:
    """A conversation. out: the console for answers. err: the console for everything else."""

    peer: ChatPeer
    talk: TypedConversation
    out: Console
    err: Console

    def converse(self) -> int:
        self.print_note(f"{self.peer.model} at {self.peer.base}; /help lists the commands, Ctrl-D leaves")
        line = enable_history(user_state_path("rekindle", appauthor=False) / "chat_history")
        while True:
            try:
                prompt = read_prompt(line)
                if command := parse_command(prompt):
                    self.run_command(command)
                elif prompt and (answer := self.answer(prompt)) is not None:
                    self.print_note(answer.line)
            except EOFError:
                self.out.print()
                return 0
            # What was being typed is dropped.
            except KeyboardInterrupt:
                self.out.print()
            except UserError as error:
                self.print_error(str(error))

    def answer(self, prompt: str) -> ChatAnswer | None:
        """Show the answer to a prompt as it comes, and add it to the conversation.

        Ctrl-C ends the answer, and the part that has come is kept. Return None if the request failed; the failure was
        printed.
        """
        answer = ChatAnswer()
        why = ""
        with without_echo(STANDARD_INPUT), choose_view(self.out) as shown:
            try:
                anyio.run(self.peer.ask, self.talk.build_messages(prompt), answer, shown.show)
            except KeyboardInterrupt:
                answer.cancelled = True
            except (StreamBroken, httpx2.HTTPError, BaseExceptionGroup) as error:
                why = describe_failure(error)
        if answer.text:
            self.talk.add_turn(prompt, answer.text)
        if why:
            self.print_error(why)
            return None
        return answer

    def run_command(self, command: Command) -> None:
        path = Path(command.file).expanduser()
        try:
            match command.name:
                case "save":
                    self.talk.save(path)
                    self.print_note(f"{format_count(len(self.talk.messages), 'message')} kept in {path}")
                case "load":
                    self.talk.load(path)
                    self.print_note(f"{format_count(len(self.talk.messages), 'message')} loaded from {path}")
                case "clear":
                    self.talk.clear()
                    self.print_note("new conversation")
                case "help":
                    self.print_note("\n".join((*COMMANDS.values(), *KEYS)))
        except OSError as error:
            raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from error

    def print_note(self, text: str) -> None:
        self.out.print(Line(text, style="dim"), soft_wrap=True)

    def print_error(self, text: str) -> None:
        self.err.print(Line(f"rekindle: {text}", style="red"), soft_wrap=True)


def describe_failure(error: BaseException) -> str:
    """Return a failure in one line. An error that is no failure of a request is a bug, and raised again."""
    reason = find_innermost(error)
    if isinstance(reason, StreamBroken):
        return str(reason)
    if isinstance(reason, httpx2.HTTPError):
        return describe_error(reason)
    raise error


def enable_history(file: Path) -> Callable[[str], str]:
    """Return a function that reads a line, with history where this Python has readline."""
    try:
        import readline  # noqa: PLC0415 - it changes how a terminal is read, and not every Python has it
    except ImportError:
        return input
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(MOST_HISTORY)
    return partial(keep_history, file, readline.write_history_file)


def keep_history(file: Path, write: Callable[[Path], None], shown: str) -> str:
    line = input(shown)
    # A home that cannot be written has no history.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
        write(file)
    return line
