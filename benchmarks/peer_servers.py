"""The servers that `benchmarks.peer` compares: how each is started, asked whether it is ready, and stopped.

All of them listen on a port of this machine and speak OpenAI's protocol. A `Contender` knows the command of one, for a
number of sequences at once and a number of tokens that each may have.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import httpx
from attrs import field, frozen

ROOT = Path(__file__).parents[1]
PATIENCE_S = 600.0  # for a server to come up: vLLM compiles a hybrid for 265 s
POLL_S = 0.05  # between questions whether it is there: a server that answers them meanwhile comes up later for it
ENDING_S = 60.0  # for a server to write what it keeps, and to end
# What vLLM must not do: ask a network for models, report its use, or compile a sampler with a compiler that is missing.
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
VLLM_EXACT = {"VLLM_BATCH_INVARIANT": "1"}  # its nearest to equal answers
VLLM_EXACT_FLAGS = ("--attention-backend", "FLASH_ATTN")

MODULE = ("engine", "serve")
DRAWN_MODULE = ("benchmarks.hybrid", "serve", "bf16", "0")  # its weights are drawn as it starts


@frozen
class Contender:
    """A server. command: its words, for a number of sequences and the tokens of each. version: asks for its version."""

    command: Callable[[int, int], list[str]]
    folder: Path = ROOT  # that it runs in
    environment: Mapping[str, str] = field(factory=dict[str, str])  # besides this process's own
    version: tuple[str, ...] = ()

    def make_environment(self, home: Path) -> dict[str, str]:
        """home: where it keeps what it measured, and rows of prompts."""
        path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH"))))
        return {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(home), **self.environment}

    def find_version(self) -> str:
        """Return what the server says of its version, in one line."""
        if not self.version:
            return ""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(self.version, check=False, capture_output=True, text=True, env=environment)
        lines = (done.stdout + done.stderr).strip().splitlines()
        # llama.cpp lists devices before it.
        return next((line for line in lines if line.startswith("version")), lines[0] if lines else "unknown")


def serve_ours(
    model: Path, tree: Path, flags: Sequence[str], *, sized: bool, module: Sequence[str] = MODULE
) -> Contender:
    """Our server from a checkout. sized: it gets as many slots as asked, of the length asked; else its defaults.

    module: that is run, and the words before those of `rekindle serve`.
    """

    def command(sequences: int, rows: int) -> list[str]:
        size = ("--slots", str(sequences), "--max-ctx", str(rows)) if sized else ()
        return [sys.executable, "-m", *module, str(model), *size, *flags]

    return Contender(command, tree)


def serve_llama(program: Path, file: Path, device: Sequence[str]) -> Contender:
    """llama.cpp's server on a GGUF file. Prompts stay in its slots only, since its cache in host memory is off."""

    def command(sequences: int, rows: int) -> list[str]:
        words = (str(program), "-m", str(file), "-fa", "on", "--cache-ram", "0", *device)
        return [*words, "-np", str(sequences), "-c", str(sequences * rows)]

    return Contender(command, version=(str(program), "--version"))


def serve_vllm(model: Path, python: str, path: str, flags: str, *, exact: bool = False) -> Contender:
    """vLLM's server on a checkpoint, with its defaults. path: folders for PYTHONPATH; empty: as it is installed.

    Sequences are as many as it likes, since it shares its memory between them.
    """
    environment = {**VLLM_ENVIRONMENT, **(VLLM_EXACT if exact else {})}
    if path:
        environment["PYTHONPATH"] = path
    more = (*(VLLM_EXACT_FLAGS if exact else ()), *shlex.split(flags))

    def command(_: int, rows: int) -> list[str]:
        words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
        words += ["--max-model-len", str(rows), "--gpu-memory-utilization", "0.85", "--enable-prompt-tokens-details"]
        return [*words, *more]

    asking = (python, "-c", "from importlib.metadata import version; print(version('vllm'))")
    return Contender(command, environment=environment, version=asking)


@contextmanager
def listen(contender: Contender, sequences: int, rows: int, home: Path) -> Iterator[tuple[str, float]]:
    """Start a server. Yields its address, and the seconds until it had a model to offer. Ends it afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = home / "server.log"
    command = [*contender.command(sequences, rows), "--port", str(port)]
    with httpx.Client() as client, log.open("a") as written:
        start = time.monotonic()
        process = subprocess.Popen(
            command, cwd=contender.folder, env=contender.make_environment(home), stdout=written, stderr=written
        )
        try:
            while not is_ready(client, url):
                if process.poll() is not None or time.monotonic() - start > PATIENCE_S:
                    raise SystemExit(f"no server: {shlex.join(command)}\n{log.read_text()[-2000:]}")
                time.sleep(POLL_S)
            yield url, time.monotonic() - start
        finally:
            process.terminate()
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
                process.wait()


@contextmanager
def start_all(
    servers: Mapping[str, Contender], sequences: int, rows: int, scratch: Path
) -> Iterator[dict[str, tuple[str, float]]]:
    """Start servers at the same moment. Yields the address of each and the seconds that it took. Ends all afterwards.

    scratch: that gets a folder for each.
    """

    def start(name: str) -> tuple[str, float]:
        home = scratch / name
        home.mkdir()
        return stack.enter_context(listen(servers[name], sequences, rows, home))

    with ExitStack() as stack, ThreadPoolExecutor(len(servers)) as pool:
        yield dict(zip(servers, pool.map(start, servers), strict=True))


def listen_to(command: Sequence[str], folder: Path, home: Path) -> AbstractContextManager[tuple[str, float]]:
    """Start a server of one command, as `listen` does. folder: that it runs in."""
    return listen(Contender(lambda _, __: list(command), folder), 1, 0, home)


def is_ready(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url + "/health").is_success and client.get(url + "/v1/models").is_success
    except httpx.TransportError:
        return False


def measure_memory() -> float:
    """Return the MB of everything that this process has started, each its share of pages in common."""
    return sum(map(measure_share, list_children(os.getpid()))) * 1024 / 1e6


def measure_share(process: int) -> int:
    """Return the KiB of a process. 0: it has ended meanwhile."""
    try:
        rolled = Path(f"/proc/{process}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(re.findall(r"^Pss:\s+(\d+)", rolled, re.MULTILINE)[0])


def list_children(process: int) -> list[int]:
    """List all processes that this one has started, and those that these have started."""
    found = list[int]()
    for each in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, each.read_text().split()):
            found += [child, *list_children(child)]
    return found
