"""Measures how long other clients wait while a crowd holds connections to a server, for each kind of crowd.

    python -m tests.campaign.connections [--kinds "post heads" silent ...] [--connections 2000] [--seconds 10]
                                         [--rate 500] [--keys] [--json]

An honest client opens a connection, asks one thing (`GET /health`, or `POST /tokenize` with a body), and reads the
answer. Exit status 1 if one waited longer than 1 s, the median was over 50 ms, or one was not answered with 200.
Figures mean something on a machine that has nothing else to do, with a core for each of server, crowd and clients.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
from attrs import asdict, define, field, frozen

from benchmarks.results import describe_machine
from benchmarks.tables import print_table
from tests.campaign.case import Case, quiet
from tests.campaign.crowd import KINDS, crowd
from tests.e2e.prepared import serving
from tests.e2e.server import Running
from tests.plain_http import NO_TLS

MOST_S, MEDIAN_S = 1.0, 0.05
PATIENCE_S = 30.0  # of an honest client
PAUSE_S = 0.02  # between two of them
GATHERING_S = 1.0  # until the crowd is there
KEY = "a key of the honest"
CROWDS, RATE, TRIES = (200, 600, 1500), 300, 4  # of a case: connections, as many anew a second, honest clients


@define
class Waits:
    """seconds: of those that were answered.  others: what else came of a try.  opened: by the crowd.  cpu_s: the
    server's processor time, honest clients included.
    """

    seconds: list[float] = field(factory=list)
    others: list[str] = field(factory=list)
    opened: int = 0
    cpu_s: float = 0

    def ask(self, url: str, key: str | None) -> None:
        """One honest client."""
        began = time.monotonic()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            with httpx.Client(
                base_url=url, timeout=PATIENCE_S, trust_env=False, headers=headers, verify=NO_TLS
            ) as client:
                if (len(self.seconds) + len(self.others)) % 2:
                    response = client.post("/tokenize", json={"content": "Hello, world. " * 20})
                else:
                    response = client.get("/health")
        except httpx.HTTPError as error:
            self.others.append(type(error).__name__)
        else:
            if response.status_code == 200:
                self.seconds.append(time.monotonic() - began)
            else:
                self.others.append(str(response.status_code))

    def row(self, kind: str) -> dict[str, object]:
        found = sorted(self.seconds)
        return {
            "kind": kind,
            "opened": self.opened,
            "cpu ms each": 1000 * self.cpu_s / max(1, self.opened),
            "tries": len(found) + len(self.others),
            "median ms": 1000 * statistics.median(found) if found else "-",
            "p99 ms": 1000 * found[int(0.99 * (len(found) - 1))] if found else "-",
            "most ms": 1000 * found[-1] if found else "-",
            "others": " ".join(sorted(self.others)[:5]) or "-",
        }

    def missed(self) -> bool:
        """Was a goal?"""
        return bool(self.others) or max(self.seconds) > MOST_S or statistics.median(self.seconds) > MEDIAN_S


@frozen
class Attack:
    """A crowd, and how long honest clients come at the same time."""

    kind: str
    count: int
    rate: float
    seconds: float

    def measure(self, server: Running, key: str | None) -> Waits:
        waits, before = Waits(), processor_seconds(server)
        with crowd(self.kind, httpx.URL(server.url).port or 80, self.count, self.rate) as attacking:
            time.sleep(GATHERING_S)
            end = time.monotonic() + self.seconds
            while time.monotonic() < end:
                waits.ask(server.url, key)
                time.sleep(PAUSE_S)
        waits.opened, waits.cpu_s = attacking.opened, processor_seconds(server) - before
        return waits


def processor_seconds(server: Running) -> float:
    """Return the seconds of processor time that the server's process has used."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def crowds(_: Path) -> Iterator[Case]:
    """Yield cases with a crowd of any kind. Honest clients have to be answered at the same time, within
    their patience.
    """
    with serving("--slots", "2") as server:

        def case(random: Random) -> None:
            kind, count, waits = random.choice(KINDS), random.choice(CROWDS), Waits()
            with crowd(kind, httpx.URL(server.url).port or 80, count, RATE):
                time.sleep(GATHERING_S)
                for _ in range(TRIES):
                    waits.ask(server.url, None)
            assert waits.others == [], (kind, count, waits.others)
            quiet("".join(server.errors))

        yield case
        assert server.stop() == 0
    quiet("".join(server.errors))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.connections", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=10, help="of honest clients, for each kind")
    parser.add_argument("--rate", type=float, default=500, help="connections that are opened anew a second, at most")
    parser.add_argument("--keys", action="store_true", help="the server has a key, which crowds do not know")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(words)
    rows, missed, key = [], False, KEY if asked.keys else None
    for kind in asked.kinds:
        with tempfile.TemporaryDirectory() as folder:
            keys = Path(folder) / "keys"
            keys.write_text(KEY + "\n")
            with serving("--slots", "2", *(["--api-key-file", str(keys)] if key else [])) as server:
                waits = Attack(kind, asked.connections, asked.rate, asked.seconds).measure(server, key)
        rows.append(waits.row(kind))
        missed |= waits.missed()
        print_table(f"{kind}: {asked.connections} connections", rows[-1:])
    print_table("what others wait", rows)
    if asked.json:
        print(json.dumps({"connections": rows, "machine": asdict(describe_machine())}))  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
