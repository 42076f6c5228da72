"""Measures what compression costs a request that does not ask for it: bytes of the ledger, and the time in which a
request is examined.

`python -m benchmarks.compression_off`; one server, with a drafter that is named and not used, and one without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

from benchmarks.arguments import benchmark_parser
from benchmarks.results import publish
from effects.compression import Compression
from effects.job import Job
from states import policy
from states.kept_rows import make_prompt
from states.settings import DecisionContext, Settings
from tests.e2e.server import serving

ROUNDS, REPEATS = 200, 100
PROMPT = tuple(range(8000))


def main() -> None:
    given, found = benchmark_parser(__doc__).parse_args(), dict[str, Any]()
    for name, words in (("no drafter", ()), ("a drafter, mode off", ("--prefill-drafter", "demo"))):
        with serving("demo", *words) as server:
            server.chat("Hello", max_tokens=8)
            found[name] = ledger(server.client.get("/props").json()["memory"])
            print(f"{name}: {found[name]}")
    settings = DecisionContext(Settings(max_context=16_384, scorer_max_tokens=100_000))
    for name, how in (("off", Compression()), ("auto, below its threshold", Compression("auto"))):
        job = Job(PROMPT, 100, compression=how)
        looked = microseconds(partial(policy.decide_compression, settings, make_prompt(job), len(PROMPT) - 1))
        known = microseconds(partial(make_prompt, job))
        print(f"{name}: {looked:.2f} us to look at a prompt, {known:.2f} us to see that nothing of it was frozen")
        found[name] = {"look_us": looked, "known_us": known}
    publish(given, "compression_off", found)


def ledger(memory: Mapping[str, Any]) -> str:
    held = memory["models"].get("drafter", {"device": 0, "host": 0})
    buffers = memory["buffers"].get("drafter", 0)
    return f"{held['device']} bytes on the device, {held['host']} in host memory, {buffers} of buffers"


def microseconds(work: Callable[[], object]) -> float:
    """Return the microseconds of one call: the median of rounds."""
    took = list[float]()
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        for _ in range(REPEATS):
            work()
        took.append((time.perf_counter_ns() - start) / REPEATS / 1000)
    return median(took)


if __name__ == "__main__":
    main()
