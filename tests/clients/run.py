"""The npm SDKs against a server on loopback, whose answers are scripted: `python -m tests.clients.run`.

Installs them into a folder that goes again (`--keep FOLDER` leaves it there, for another time), and needs node and npm.
Prints a line for each case, and exits with 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio

from effects.job import Job
from tests.http.conftest import Site, served
from tests.text import small

PACKAGES = ("openai", "@anthropic-ai/sdk", "ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod")
CASES = Path(__file__).with_name("sdks.mjs")
CALL = (
    '<think>\nHm.\n</think>\n\nLet me add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
)
ANSWER = "It is three."
LONG = "Once more, then. "


def scripted(site: Site) -> None:
    """A call, and the answer when its result is there; without tools the answer, or many words where asked for."""
    tokenizer = site.text.tokenizer

    def script(job: Job) -> Iterator[int]:
        asked = tokenizer.decode(job.prompt, special=True)
        last = asked.rpartition("<|im_start|>user")[2]
        calls = "<tools>" in asked and "<tool_response>" not in last
        text = LONG * 400 if "many words" in last else CALL if calls else ANSWER
        yield from tokenizer.encode_now([text])[0]

    site.door.script = script


def install(folder: Path) -> Path:
    """The SDKs and the cases. Returns the folder of a checkpoint's text files."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent", *PACKAGES]
    subprocess.run(command, cwd=folder, check=True)
    (folder / CASES.name).write_text(CASES.read_text())
    return small.write(Path(tempfile.mkdtemp(dir=folder)))


async def main(folder: Path) -> int:
    async with served(install(folder), max_ctx=100_000, door={"step_s": 0.0005}) as site:
        scripted(site)
        command = ["node", CASES.name, str(site.client.base_url)]
        environment = {"PATH": os.environ["PATH"], "AI_SDK_LOG_WARNINGS": "false"}
        done = await anyio.run_process(command, cwd=folder, env=environment, stdout=None, stderr=None, check=False)
        left = [ticket.reason for ticket in site.door.tickets].count("client_gone")
        sys.stdout.write(f"{left} answers were cancelled because their client left\n")
        return done.returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path)
    kept: Path | None = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as passing:
        sys.exit(anyio.run(main, kept or Path(passing)))
