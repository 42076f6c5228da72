"""A real server process under attack over real sockets, and one whose cache is damaged while it serves.

What it says to everybody else is compared with the answers of a server that keeps no cache.
"""

from __future__ import annotations

import json
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import httpx
from attrs import define, field

from adapters.store.disk.file_names import QUARANTINE
from tests.campaign.case import UNCOUNTED, Case, Hang, Leak, quiet, resident
from tests.campaign.damage import harm
from tests.campaign.hostile import spoilt, spoilt_bytes, text_of
from tests.e2e.prepared import serving
from tests.e2e.server import Running

DEADLINE_S = 45.0  # for an answer; a head must come within 10 s, the next part of a body within 30 s
SETTLING_S = 30.0  # until everything is given back
MEMORY_MIB = 256  # that a server may keep after some hundred hostile requests: its parsers' and its pools' memory
PROBES = 6
ASKED = {"max_tokens": 4, "temperature": 0.8, "seed": 5, "logprobs": 2}
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
GENERATING = (CHAT, PLAIN, MESSAGES, RESPONSES)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "demo",
        "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "max_tokens": 2,
        "stream": False,
        "stop": ["\n"],
        "logit_bias": {"5": -1},
        "response_format": {"type": "text"},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    },
    PLAIN: {"prompt": ["Hello", "x = "], "max_tokens": 2, "temperature": 0.5, "seed": 1, "logprobs": 1, "n": 1},
    MESSAGES: {
        "max_tokens": 2,
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
    },
    RESPONSES: {
        "max_output_tokens": 2,
        "instructions": "x",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
    },
    "/tokenize": {"content": "Hello <|im_end|>", "parse_special": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": [{"role": "user", "content": "Hello"}]},
}


def prompt(number: int) -> list[int]:
    """Longer than a file's least number of tokens, and like no other one."""
    return [10 + (37 + number) * n % 4000 for n in range(1, 700)]


def answer(server: Running, number: int) -> dict[str, Any]:
    response = server.complete(prompt(number), **ASKED)
    assert response.status_code == 200, response.text[:500]
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


@cache
def cold() -> tuple[dict[str, Any], ...]:
    """The answers of a server that keeps nothing, each prompt from nothing."""
    with serving("--slots", "1", "--host-cache-budget", "0") as server:
        return tuple(answer(server, number) for number in range(PROBES))


@define
class CampaignSite:
    server: Running
    descriptors: int = 0
    threads: int = 0
    memory: int = 0
    run: int = 0
    _address: tuple[str, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        url = httpx.URL(self.server.url)
        self._address = (url.host, url.port or 80)

    def connect(self) -> socket.socket:
        return socket.create_connection(self._address, timeout=DEADLINE_S)

    def held(self) -> tuple[int, int]:
        process = Path(f"/proc/{self.server.process.pid}")
        return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))

    def warm(self) -> None:
        """Send the first requests, and note what is there afterwards. Pools and caches that they create stay."""
        for path, body in BODIES.items():
            self.server.client.post(path, json=body)
        self.check(0)
        self.descriptors, self.threads = self.held()
        self.memory = resident(self.server.process.pid)

    def check(self, number: int) -> None:
        """Assert that the server answers as before, and has shown no traceback."""
        assert self.server.client.get("/health").status_code == 200
        assert answer(self.server, number) == cold()[number]
        quiet("".join(self.server.errors))

    def settle(self) -> None:
        """Everything is given back."""
        end = time.monotonic() + SETTLING_S
        while (now := self.held()) > (self.descriptors + 2, self.threads + 8) or self.busy():
            if time.monotonic() > end:
                raise Leak(f"{now} descriptors and threads where there were {self.descriptors}, {self.threads}")
            time.sleep(0.1)
        if (grown := resident(self.server.process.pid) - self.memory) > MEMORY_MIB:
            raise Leak(f"{grown} MiB more than before")

    def busy(self) -> bool:
        return any(slot.get("is_processing") for slot in self.server.client.get("/slots").json())


def check_answer(response: httpx.Response) -> None:
    """Check that an answer may be shown to any client, and that an error says what is wrong."""
    quiet(response.text)
    assert response.status_code < 500 or response.status_code == 503, (response.status_code, response.text[:500])
    if response.status_code >= 400:
        assert response.json()["error"], "an error says what is wrong"


@contextmanager
def site(*words: str) -> Iterator[CampaignSite]:
    """Yield a server. In the end it must stop when it is asked to, with exit status 0, and with nothing but its log on
    standard error.
    """
    cold()
    with serving(*words) as server:
        found = CampaignSite(server)
        found.warm()
        yield found
        found.check(1)
        found.settle()
        assert server.stop() == 0
    quiet("".join(server.errors))


# --- bodies ---


@contextmanager
def bodies(_: Path) -> Iterator[Case]:
    """Well-formed bodies with something in them that was not expected, and bytes that are hardly JSON."""
    with site("--slots", "2") as attacked:

        def case(random: Random) -> None:
            path = random.choice(list(BODIES))
            value = bounded(spoilt(BODIES[path], random))
            raw = text_of(value).encode()
            if random.random() < 0.3:
                raw = spoilt_bytes(raw, random)
                path = random.choice(list(BODIES)) if path not in GENERATING else "/tokenize"
            headers = {"content-type": random.choice(("application/json", "application/json", "text/x", "a/b+json"))}
            check_answer(attacked.server.client.post(path, content=raw, headers=headers, timeout=DEADLINE_S))
            attacked.run += 1
            if attacked.run % 25 == 0:
                attacked.check(random.randrange(PROBES))

        yield case


def bounded(value: Any) -> Any:
    """No long answer is asked for where a long one is anybody's right."""
    if isinstance(value, dict):
        value.setdefault("max_tokens", 2)
        value.setdefault("max_output_tokens", 2)
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "n_predict"):
            if isinstance(found := value.get(name), int) and not isinstance(found, bool) and (found > 4 or found == -1):
                value[name] = 3
        for name in ("max_tokens", "max_output_tokens"):
            if value[name] is None:  # no limit at all
                value[name] = 2
    return value


# --- connections ---

GOOD = b'{"prompt":"Hello","max_tokens":2}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEADS = (
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\nx",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\n\r\n",
    b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%00%ff/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX\x00: a\r\n\r\n",
    b"BREW /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50,
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD + b"Content-Length: 99999999999999999999\r\n\r\n" + GOOD,
    HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + GOOD,
    HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n" + GOOD,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFF\r\n" + GOOD,
    HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + GOOD,
    HEAD + b"Content-Encoding: gzip\r\nContent-Length: 33\r\n\r\n" + GOOD,
    HEAD + b"Expect: 100-continue\r\nContent-Length: 33\r\n\r\n" + GOOD,
    HEAD + b"Content-Length: 33\r\n\r\n" + GOOD[:10],
)


# A text, how often it makes a prompt of some hundred tokens, and how often one that the demo has no room for (32,768
# tokens). A prompt between the two is computed and then answered, which takes seconds and shows nothing of its own.
LONG_TEXTS = (
    ("All work and no play. ", 100, 5_000),
    ("a", 1_000, 100_000),
    ("\u6771", 200, 100_000),
    (" ", 10_000, 600_000),
)


def posted(raw: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(raw) + raw


def heard(connection: socket.socket, most: int = 1 << 20) -> bytes:
    """Until the server closes, or has said enough, or is silent for a moment after it has answered."""
    said = bytearray()
    with suppress(ConnectionError):
        while len(said) < most:
            try:
                raw = connection.recv(1 << 16)
            except TimeoutError:
                if said:
                    break
                raise Hang(f"no answer within {DEADLINE_S} s") from None
            if not raw:
                break
            said += raw
            connection.settimeout(0.2)
    return bytes(said)


def leave(connection: socket.socket, random: Random) -> None:
    """Close a connection as clients do: politely, or with a reset."""
    if random.random() < 0.5:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def attacks(_: Path) -> Iterator[Case]:
    """Heads and bodies that are wrong, slow or large, and clients that leave in the middle."""
    with site("--slots", "2") as attacked:
        endless = json.dumps(attacked.server.endless()).encode()

        def case(random: Random) -> None:
            attack(attacked, endless, random)
            attacked.run += 1
            if attacked.run % 10 == 0:
                attacked.check(random.randrange(PROBES))

        yield case


def attack(site: CampaignSite, endless: bytes, random: Random) -> None:
    connection = site.connect()
    with connection, suppress(ConnectionError):
        match random.randrange(8):
            case 0 | 1:  # a head; one that waits for more is left after a moment
                raw = random.choice(HEADS)
                connection.sendall(spoilt_bytes(raw, random) if random.random() < 0.5 else raw)
                if random.random() < 0.7:
                    connection.shutdown(socket.SHUT_WR)
                    answered(heard(connection))
                else:
                    time.sleep(0.01)
            case 2:  # an abandoned stream
                connection.sendall(posted(endless))
                connection.recv(random.choice((1, 300, 3000)))
            case 3:  # one that is never read
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                connection.sendall(posted(endless))
                time.sleep(0.05)
            case 4:  # byte by byte, for a while
                for at in range(random.randrange(60)):
                    connection.sendall(posted(GOOD)[at : at + 1])
            case 5:  # a long prompt or one that is too long, answered or not waited for
                unit, few, many = random.choice(LONG_TEXTS)
                text = unit * random.choice((few, many))
                connection.sendall(posted(json.dumps({"prompt": text, "max_tokens": 1}).encode()))
                if random.random() < 0.6:
                    answered(heard(connection))
            case 6:  # JSON that costs
                unit, count = random.choice((("[5],", 50_000), ("{},", 50_000), ("[", 100_000), ("9", 20_000)))
                connection.sendall(posted(('{"prompt":[' + unit * count).encode()))
                answered(heard(connection))
            case _:  # several at once, some of them nonsense
                some = [random.choice((posted(GOOD), random.choice(HEADS))) for _ in range(random.randint(2, 6))]
                connection.sendall(b"".join(some))
                answered(heard(connection))
        leave(connection, random)


def answered(said: bytes) -> None:
    """Nothing, where a client was cut off; otherwise HTTP without a bug in it."""
    quiet(said.decode("latin-1"))
    assert not said or said.startswith(b"HTTP/1.1 "), said[:200]
    assert b"HTTP/1.1 500" not in said, said[:2000]


# --- a cache that is damaged while it is used ---


@define
class Lives:
    """One server after another in one folder. aside: damaged files that earlier ones have put there."""

    folder: Path
    server: Running = field(init=False)
    aside: int = 0
    _stack: ExitStack = field(factory=ExitStack)

    def begin(self, expected: str = "") -> None:
        """expected: what will be found damaged."""
        self.aside = self.set_aside()
        words = ("--slots", "1", "--host-cache-budget", "0", "--kv-cache-dir", str(self.folder))
        self.server = self._stack.enter_context(serving(*words))
        label = f'rekindle_damaged_files_total{{what="{expected}"}} 1.0'
        assert not expected or label in self.server.client.get("/metrics").text.splitlines(), UNCOUNTED

    def end(self) -> None:
        self._stack.close()
        quiet("".join(self.server.errors))

    def set_aside(self) -> int:
        return len(list(self.folder.glob(QUARANTINE + "*")))

    def files(self) -> list[Path]:
        """Return the files of runs. Links, pipes and folders with such names are removed first, since the server leaves
        them alone.
        """
        found = list[Path]()
        for file in sorted(self.folder.glob("*.safetensors.zst")):
            if file.is_symlink() or file.is_fifo():
                file.unlink(missing_ok=True)
            elif file.is_dir():
                file.rmdir()
            elif not file.name.startswith(QUARANTINE):
                found.append(file)
        return found


@contextmanager
def served(path: Path) -> Iterator[Case]:
    """One slot, no host memory: what a prompt does not find on disk is computed. Now and then it is killed."""
    cold()
    lives = Lives(path / "kv")
    lives.begin()

    def case(random: Random) -> None:
        before, files = damage_counted(lives.server), lives.files()
        count = min(max(0, len(files) - 1), random.choice((0, 1, 3)))
        for file in random.sample(files, count):
            with suppress(FileNotFoundError):  # the server has put one aside meanwhile
                harm(file, [one for one in files if one != file and one.is_file()], random)
        number = random.randrange(PROBES)
        assert answer(lives.server, number) == cold()[number]
        now = damage_counted(lives.server)
        assert now >= before
        assert now >= lives.set_aside() - lives.aside, UNCOUNTED
        if random.random() < 0.03:
            lives.server.stop(signal.SIGKILL)
            lives.end()
            lives.begin(zeroed(lives.folder, random))

    try:
        yield case
        assert lives.server.stop() == 0
    finally:
        lives.end()


def zeroed(folder: Path, random: Random) -> str:
    """One of the files that a start reads whole, if any; which kind."""
    kind = random.choice(("", "journal", "recent"))
    for file in folder.glob(f"{kind}*") if kind else ():
        file.write_bytes(bytes(file.stat().st_size))
        return kind
    return ""


def damage_counted(server: Running) -> int:
    """Damage that /metrics counts."""
    lines = server.client.get("/metrics").text.splitlines()
    names = ("rekindle_cache_quarantined_total ", "rekindle_cache_read_errors_total ")
    return sum(int(float(line.split()[1])) for line in lines if line.startswith(names))
