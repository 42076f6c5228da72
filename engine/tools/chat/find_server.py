"""Finds the server to talk to: the one that was named, ours if it runs, or one that is started for the conversation."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import httpx2
from rich.console import Console

from engine.settings.sse_client import describe_complaint, describe_error, parse_json
from engine.settings.user_error import UserError
from engine.tools.chat.chat_client import ChatPeer
from engine.tools.chat.chat_options import ChatOptions

OURS = "http://127.0.0.1:8000"
READY = re.compile(r"ready  (http://\S+)  ")
STARTING = re.compile(r"starting: (.+) \(")
# The seconds that a server may take to list its models, and the seconds between two questions while it loads.
MEET_S = 30.0
AGAIN_S = 0.25
# The time for a server that was started here to stop: its --grace, and some more.
STOP_S = 15.0
LOG_LINES = 40  # last lines of the server's log, which are shown if it does not start


class NoServer(Exception):
    """No server answers there, or the program that answers is no model server. The message is one line."""


@contextmanager
def find_peer(model: str, options: ChatOptions, key: str, console: Console) -> Iterator[ChatPeer]:
    """Yield the server and the model to talk to. Raises UserError. console: shows what takes a while."""
    base = options.base or OURS
    status = console.status(f"{base} is loading a model")
    try:
        models = list_served_models(base, key, trusting=bool(options.url), loading=status.start)
    except NoServer as error:
        if options.url:
            raise UserError(f"--url {options.url}: {error}") from error
        models = []
    finally:
        status.stop()
    if found := choose_model(model, models, named=bool(options.url)):
        yield ChatPeer(base, found, key, options)
        return
    with start_server(model, console) as url:
        yield ChatPeer(url, list_served_models(url, key)[0], key, options)


def choose_model(model: str, models: list[str], *, named: bool) -> str:
    """Return the name of the server's model to ask; empty if the server does not have it.

    named: the person chose the server, which may know more names than it lists.
    """
    if not model:
        return models[0] if models else ""
    for name in (model, Path(model).name, Path(model).name.removesuffix(".gguf")):
        if name in models:
            return name
    return model if named else ""


def list_served_models(
    base: str, key: str, *, trusting: bool = False, loading: Callable[[], Any] = lambda: None
) -> list[str]:
    """Return the models of the server. Raises NoServer.

    loading: called while the server loads its model. This function waits for it.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx2.Client(base_url=base, headers=headers, timeout=MEET_S, trust_env=trusting) as http:
        while True:
            try:
                answer = http.get("/v1/models")
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                raise NoServer(f"no server answers there ({describe_error(error)})") from error
            if answer.status_code != 503:
                break
            loading()
            time.sleep(AGAIN_S)
    if answer.status_code in (401, 403):
        raise UserError(f"{base}: HTTP {answer.status_code}: the key in the environment is missing or wrong")
    found = parse_json(answer.content)
    try:
        return [str(model["id"]) for model in found["data"]]
    except (LookupError, TypeError) as error:
        raise NoServer(f"it lists no models: HTTP {answer.status_code}: {describe_complaint(found)}") from error


@contextmanager
def start_server(model: str, console: Console) -> Iterator[str]:
    """Start our server on a port of its own for as long as the block takes. Raises UserError if it does not start.

    It gets a process group of its own, so that Ctrl-C ends the answer and not the server.
    """
    words = [*([model] if model else []), "--host", "127.0.0.1", "--port", "0", "--log-level", "info"]
    command = [sys.executable, "-P", "-m", "engine", "serve", *words, "--log-format", "text"]
    with (
        stop_at_exit(),
        subprocess.Popen(  # noqa: S603 - this program, and a list
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield wait_until_ready(process, console)
        finally:
            stop_server(process)


def wait_until_ready(process: subprocess.Popen[str], console: Console) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    output = deque[str](maxlen=LOG_LINES)
    log = process.stderr
    with console.status("starting a server") as status:

        def read() -> None:
            for line in log:
                output.append(line.strip())
                if step := STARTING.search(line):
                    status.update(f"starting a server: {step[1]}")

        reader = Thread(target=read, daemon=True)
        reader.start()
        ready = READY.match(process.stdout.readline())
    if ready is None:
        process.wait(STOP_S)
        reader.join(STOP_S)
        why = [line.removeprefix("rekindle: ") for line in output if line.startswith("rekindle: ")]
        raise UserError((why or [*output] or ["the server ended without a message"])[-1])
    Thread(target=process.stdout.read, daemon=True).start()
    return ready[1]


def stop_server(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


@contextmanager
def stop_at_exit() -> Iterator[None]:
    """End the server that was started here if the terminal is closed or a SIGTERM comes."""

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
