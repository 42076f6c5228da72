"""Coding agents with their own prompts against `rekindle serve demo`: `python -m tests.clients.agents [AGENT...]`.

Claude Code, Codex and OpenCode (npm) each do a small task in a folder of their own: their own tools write, read and
change a file and run it, the server is killed (SIGKILL) in the middle, and a second process goes on with the session.
What they send goes to the server as it is, through a relay that adds one field, a grammar with room for one answer:
the demo is too small to write programs. It prints a line for each request: tokens of the prompt, those that are new,
those that were restored, computed, and recognised as generated ones. Exits with 1 where a turn computed more than what
was new and a chunk, or a task was not done. `--keep FOLDER` leaves packages, bodies and logs there.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
import uvicorn
from anyio.abc import ByteReceiveStream, Process, TaskGroup
from attrs import define, field, frozen
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.clients.tasks import AFTER, AGENTS, PACKAGES, TITLE, Answer, CodingAgent, grammar
from tests.plain_http import NO_TLS

CHUNK = 256  # tokens that a prefill computes at a time
LONGEST_S = 900
SETTLED_S = 3.0  # between an answer and the kill, for what it left to be written
ROOT = Path(__file__).parents[2]
KILLED_BEFORE = 3  # the request with tools, counted from 0


@frozen
class AgentRequest:
    """The place of a request in its session. main: it has tools."""

    number: int
    main: bool
    after_kill: bool


@frozen
class AgentTurn:
    """The result of one request, in tokens. details: its `rekindle` object."""

    agent_request: AgentRequest
    prompt: int
    restored: int
    answered: int
    details: Mapping[str, Any]

    @property
    def computed(self) -> int:
        return self.prompt - self.restored


@define(eq=False)
class Relay:
    """Between one agent and a server that it starts, and kills once. folder: for its cache, its log and the bodies."""

    agent: CodingAgent
    folder: Path
    answers: Sequence[Answer]
    tasks: TaskGroup
    client: httpx.AsyncClient
    url: str = ""
    turns: list[AgentTurn] = field(factory=list)
    _server: Process | None = None
    _requests: int = 0
    _asked: int = 0

    async def start(self) -> None:
        cache = ("--kv-cache-dir", str(self.folder / "kv"))
        command = [sys.executable, "-m", "engine", "serve", "demo", "--port", "0", "--any-model", *cache]
        with (self.folder / "server.log").open("ab") as log:
            self._server = await anyio.open_process(command, cwd=ROOT, stderr=log)
        output = self._server.stdout
        assert output is not None
        first = ""
        while "ready  http" not in first or not first.endswith("\n"):
            first += (await output.receive()).decode()
        self.url = first.partition("ready  ")[2].split()[0]
        self.tasks.start_soon(drained, output)

    async def kill(self) -> None:
        assert self._server is not None
        self._server.kill()
        await self._server.wait()

    async def passed_on(self, request: Request) -> Response:
        raw = await request.body()
        if request.method != "POST" or not request.url.path.endswith(("/messages", "/responses", "/completions")):
            return await self.relayed(request, raw)
        body, number = json.loads(raw), self._requests
        self._requests += 1
        (self.folder / f"{number:02}.json").write_bytes(raw)
        main = bool(body.get("tools"))
        after_kill = main and self._asked == KILLED_BEFORE
        if after_kill:
            await anyio.sleep(SETTLED_S)
            await self.kill()
            await self.start()
        body["guided_grammar"] = grammar(self.answers[min(self._asked, len(self.answers) - 1)] if main else TITLE)
        self._asked += main
        return await self.relayed(request, json.dumps(body).encode(), AgentRequest(number, main, after_kill))

    async def relayed(self, request: Request, content: bytes, agent_request: AgentRequest | None = None) -> Response:
        kept = [(key, value) for key, value in request.headers.items() if key not in DROPPED]
        url = f"{self.url}{request.url.path}"
        asked = self.client.build_request(request.method, url, headers=kept, content=content)
        answer = await self.client.send(asked, stream=True)
        return StreamingResponse(
            self.read(answer, agent_request), answer.status_code, media_type=answer.headers.get("content-type")
        )

    async def read(self, answer: httpx.Response, agent_request: AgentRequest | None) -> AsyncIterator[bytes]:
        said = b""
        try:
            async for part in answer.aiter_bytes():
                said += part
                yield part
        finally:  # agents leave when they have seen the last event
            if agent_request is not None:
                (self.folder / f"{agent_request.number:02}.answer").write_bytes(said)
                self.turns += turn_of(said.decode(), agent_request)
            with anyio.CancelScope(shield=True):
                await answer.aclose()


DROPPED = {"host", "content-length", "accept-encoding", "connection", "transfer-encoding"}


async def drained(lines: ByteReceiveStream) -> None:
    async for _ in lines:
        pass


def turn_of(said: str, agent_request: AgentRequest) -> list[AgentTurn]:
    """From an answer of any API, whole or as events; nothing of one that its agent left before its end."""
    events = [line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data: {")] or [said]
    details, usage = dict[str, Any](), dict[str, Any]()
    for event in map(json.loads, events):
        for holder in (event, event.get("response") or {}):
            details = holder.get("rekindle") or details
            usage = holder.get("usage") or usage
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    # Anthropic counts apart what was computed, what of it is kept, and what was restored
    prompt += usage.get("cache_read_input_tokens", 0) + usage.get("cache_creation_input_tokens", 0)
    answered = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return [AgentTurn(agent_request, prompt, details["restored_tokens"], answered, details)] if details else []


def prepared(folder: Path) -> Path:
    """Its home and its project, a repository. Returns the latter."""
    for name in ("home", "project"):
        (folder / name).mkdir()
    subprocess.run(["git", "init", "-q"], cwd=folder / "project", check=True)
    return folder / "project"


def configure(agent: CodingAgent, home: Path, url: str) -> None:
    for name, text in agent.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text.replace("ADDRESS", url))


async def tried(agent: CodingAgent, packages: Path, folder: Path) -> list[AgentTurn]:
    home, project = folder / "home", prepared(folder)
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    configure(agent, home, url)
    async with (
        anyio.create_task_group() as tasks,
        httpx.AsyncClient(timeout=LONGEST_S, verify=NO_TLS) as client,
    ):
        relay = Relay(agent, folder, agent.answers(project), tasks, client)
        await relay.start()
        app = Starlette(routes=[Route("/{path:path}", relay.passed_on, methods=["GET", "HEAD", "POST"])])
        site = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        tasks.start_soon(site.serve, [listening])
        environment = {
            "PATH": f"{packages / 'node_modules/.bin'}:{os.environ['PATH']}",
            "HOME": str(home),
            **{name: value.replace("ADDRESS", url) for name, value in agent.environment.items()},
        }
        for run, command in enumerate(agent.runs):
            with (folder / f"agent-{run}.log").open("wb") as log, anyio.move_on_after(LONGEST_S):
                await anyio.run_process(
                    command, cwd=project, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
                )
        site.should_exit = True
        await relay.kill()
    return relay.turns


def lines_of(agent: CodingAgent, turns: Sequence[AgentTurn], project: Path) -> tuple[list[str], bool]:
    """A line for each request, and whether all is as it should be."""
    good, before = (project / "shapes.py").exists() and (project / "shapes.py").read_text() == AFTER, 0
    lines = [f"{agent.name}: the file is {'as asked for' if good else 'wrong'}"]
    for turn in turns:
        agent_request, details = turn.agent_request, turn.details
        new = turn.prompt - before if agent_request.main else turn.prompt
        well = not agent_request.main or not before or turn.computed <= new + CHUNK
        good = good and well
        what = ("killed; " if agent_request.after_kill else "") + ("turn" if agent_request.main else "side request")
        lines.append(
            f"{agent_request.number:3} {what:12} {turn.prompt:6} tokens, {new:6} new, {turn.restored:6} restored from "
            f"{details['tier']}, {turn.computed:6} computed, {details['remembered']:4} remembered"
        )
        lines += [f"    {name}" for name in details["stabilized"]]
        if not well:
            lines.append(f"    MISSED: {json.dumps(details['prefix_cache']['miss'])}")
        if agent_request.main:
            before = turn.prompt + turn.answered
    return lines, good


def install(packages: Path) -> None:
    packages.mkdir(parents=True, exist_ok=True)
    if not (packages / "node_modules").exists():
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent", *PACKAGES], cwd=packages, check=True)


def main(packages: Path, names: Sequence[str]) -> int:
    install(packages)
    failed = 0
    for agent in AGENTS:
        if names and agent.name not in names:
            continue
        folder = Path(tempfile.mkdtemp(dir=packages))
        lines, good = lines_of(agent, anyio.run(tried, agent, packages, folder), folder / "project")
        sys.stdout.write("\n".join([*lines, ""]))
        sys.stdout.flush()
        failed += not good
    return int(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("agents", nargs="*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as passing:
        sys.exit(main(given.keep or Path(passing), given.agents))
