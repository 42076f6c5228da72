"""Names of the objects in a shared store.

    <root of the identity>/<key>-<start>.safetensors.zst    a run, exactly as the disk tier writes its files
    servers/<server>.json                                   the last report of a server (`garbage_policy.py`)
    marks/<server>-<number>.json                            runs that a server is about to remove
    samples/<server>-<number>                               what a start writes to measure the store

The name of a run says all that its rows depend on. The root stands for the model's identity and the block size. The key
stands for all tokens up to the run's end, and the number after it for the run's first token. So servers that save one
run at the same time write the same object, and no object is ever changed.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from adapters.store.block_index import Entry
from adapters.store.block_keys import KEY_BYTES
from adapters.store.files.file_format import MAX_START, Run, format_name, parse_name

SERVERS: Final = "servers"
MARKS: Final = "marks"
SAMPLES: Final = "samples"
JSON = ".json"
SERVER_DIGITS = 16
HEX = frozenset("0123456789abcdef")


@frozen
class RunName:
    """The meaning of the name of a run's object."""

    key: bytes
    start: int


def name_run(root: bytes, run: Run) -> str:
    return f"{root.hex()}/{format_name(run.keys[-1], run.start)}"


def name_entry(root: bytes, entry: Entry) -> str:
    return f"{root.hex()}/{format_name(entry.keys[-1], entry.start)}"


def parse_run_name(name: str) -> RunName | None:
    """Return what a name says; None if it is not the name of a run."""
    folder, _, file = name.rpartition("/")
    found = parse_name(file)
    if not is_root(folder) or found is None or found[1] > MAX_START:
        return None
    return RunName(*found)


def is_root(folder: str) -> bool:
    return len(folder) == 2 * KEY_BYTES and set(folder) <= HEX


def name_report(server: str) -> str:
    return f"{SERVERS}/{server}{JSON}"


def parse_report_name(name: str) -> str:
    """Return the server whose report has this name; empty if it is no report."""
    folder, _, file = name.rpartition("/")
    server = file.removesuffix(JSON)
    return server if folder == SERVERS and file != server and is_server(server) else ""


def name_mark(server: str, number: int) -> str:
    return f"{MARKS}/{server}-{number:08x}{JSON}"


def parse_mark_name(name: str) -> str:
    """Return the server that has written a mark; empty if the name is not that of a mark."""
    folder, _, file = name.rpartition("/")
    stem = file.removesuffix(JSON)
    server, _, number = stem.partition("-")
    good = folder == MARKS and file != stem and is_server(server) and len(number) == 8 and set(number) <= HEX
    return server if good else ""


def name_sample(server: str, number: int) -> str:
    return f"{SAMPLES}/{server}-{number}"


def is_server(server: str) -> bool:
    return len(server) == SERVER_DIGITS and set(server) <= HEX
