"""Writes real blocks through the real store, in processes that are killed: `python -m tests.campaign.writer`.

A line of JSON on standard input is one life. The child is killed at the system call that the line names (`at`), or
`after` so many seconds. The answer is a line: how it ended, and which runs it was promised to be durable.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from tests.campaign import stores
from tests.store.kit import Opening, die, disk_store, settled


def live(life: dict[str, Any], report_end: int) -> None:
    opening = Opening(die)
    store = disk_store(Path(life["path"]), layout=stores.LAYOUTS[life["layout"]], folder=opening)
    opening.arm(life["at"])
    for tokens in stores.prompts(Random(life["seed"])):
        stores.keep(store, tokens)
        store.count_shared_tokens(tokens, 30)
        settled(store)
        os.write(report_end, json.dumps(tokens).encode() + b"\n")
    store.close()


def main() -> None:
    for line in sys.stdin:
        life = json.loads(line)
        hear, report_end = os.pipe()
        if not (child := os.fork()):
            with suppress(BaseException):
                live(life, report_end)
                os._exit(0)
            os._exit(1)
        os.close(report_end)
        if not life["at"]:
            time.sleep(life["after"])
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        said = bytearray()
        while select.select([hear], [], [], 20)[0] and (raw := os.read(hear, 1 << 16)):
            said += raw
        os.close(hear)
        os.kill(child, signal.SIGKILL)  # one that hangs; a zombie does not mind
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        kept = [json.loads(one) for one in said.splitlines()]
        print(json.dumps({"code": code, "kept": kept}), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
