"""The promise for every family: folders and GGUF files of small random models, one after the other, in one process.

    python -m benchmarks.exactness_families --record [--cases gemma4,gemma4:Q8_0] [--prompts 300] [--limit SECONDS]

A case is a family of `benchmarks.family_checkpoints`, or FAMILY:TYPE for a GGUF file with weights of that type. What
is compared is what `benchmarks.exactness` compares, with a random DFlash draft. FAMILY+mtp takes the checkpoint's own
prediction heads instead, and FAMILY+assistant an assistant. Folders are answered in all ways, files
in seven: in a slot, then batched by four with the draft and without it, each cold, from host memory and from disk after
`kill -9`. With --record a case is in the result as soon as it ends, and a case that is there is not measured again.
--limit: no case begins that would not end within these seconds.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import torch
from attrs import frozen

from benchmarks import exactness, results
from benchmarks.arguments import benchmark_parser
from benchmarks.exactness import MODES, Measured, prepare, run_ways
from benchmarks.family_checkpoints import FAMILIES
from benchmarks.results import Figure, Goal, decode_result, describe_machine, find_commit, publish
from benchmarks.tables import print_table

NAME = "exactness_families"
FOLDERS, FILES, DRAFTS = "small random models", "the same as GGUF files", "the same with drafts of their own"
FILE_MODES = ("continued", "host", "disk", "silent")
# Types of weights that files of a family are published with.
TYPES = {"gpt_oss": "MXFP4"}
# Drafts that a checkpoint brings, or that are published beside it.
OWN_DRAFTS = {
    "deepseek_v3": "mtp",
    "gemma4": "assistant",
    "gemma4_experts": "assistant",
    "glm4_moe": "mtp",
    "glm4_moe_lite": "mtp",
    "mimo": "mtp",
}


@frozen
class FamilyCase:
    """A family, as a folder or, with a type of weights, a GGUF file. draft: its kind, or a random DFlash one."""

    family: str
    gguf: str = ""
    draft: str = ""

    @classmethod
    def parse(cls, word: str) -> FamilyCase:
        folder, _, gguf = word.partition(":")
        family, _, draft = folder.partition("+")
        if family not in FAMILIES:
            raise argparse.ArgumentTypeError(f"{family}; accepted: {', '.join(FAMILIES)}")
        if draft and draft != OWN_DRAFTS.get(family):
            accepted = ", ".join(f"{name}+{kind}" for name, kind in OWN_DRAFTS.items())
            raise argparse.ArgumentTypeError(f"{folder}; accepted: {accepted}")
        return cls(family, gguf, draft)

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.family, self.gguf, self.draft)))

    @property
    def subject(self) -> str:
        return FILES if self.gguf else DRAFTS if self.draft else FOLDERS

    @property
    def modes(self) -> tuple[str, ...]:
        return FILE_MODES if self.gguf else MODES


def list_cases() -> list[FamilyCase]:
    folders = [*map(FamilyCase, FAMILIES), *(FamilyCase(family, draft=kind) for family, kind in OWN_DRAFTS.items())]
    return [*folders, *(FamilyCase(family, TYPES.get(family, "Q8_0")) for family in FAMILIES)]


def measure_case(case: FamilyCase, given: argparse.Namespace) -> Measured:
    sizes = {"prompts": given.prompts, "longest": given.longest, "answer": given.answer, "threads": given.threads}
    words = [f"--{name}={value}" for name, value in sizes.items()]
    words += [f"--family={case.family}", f"--gguf={case.gguf}", f"--only={','.join(case.modes)}"]
    words += [f"--draft={case.draft}"] if case.draft else []
    own = exactness.make_parser().parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        return anyio.run(run_ways, prepare(own, Path(folder)), own)


def describe(found: Measured, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Return what is recorded of a case in addition to its figure."""
    rows = found.rows
    return {
        "commit": find_commit(),
        "longest prompt": given.longest,
        "longest answer": given.answer,
        "ways": len(rows),
        "jobs": sum(row["jobs"] for row in rows),
        "differing": found.differing,
        "tokens each way": rows[0]["tokens"],
        "distinct": rows[0]["distinct"],
        "prompt tokens": found.facts["prompt_tokens"],
        "proposed": sum(row["proposed"] for row in rows),
        "accepted": sum(row["accepted"] for row in rows),
        "restored": sum(row["restored"] for row in rows),
        "followed": sum(row["followed"] for row in rows),
        "executed again": found.facts.get("executed"),
        "seconds": round(seconds),
    }


def make_figures(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Figure]:
    """Make one figure of all cases that were answered in the same ways: so many rows would hide others on the page."""
    made = list[Figure]()
    for subject, cases in found.items():
        for ways in sorted({row["ways"] for row in cases.values()}):
            rows = [row for row in cases.values() if row["ways"] == ways]
            jobs, differing = (sum(row[key] for row in rows) for key in ("jobs", "differing"))
            at = f"{ways} ways, {len(rows)} families"
            made.append(Figure("exactness", subject, at, f"of {jobs:,} differ", differing, goal=Goal(at_most=0)))
    return made


def read_recorded() -> dict[str, Any]:
    """Return the cases that are recorded for this kind of machine, by subject and name."""
    file = results.FOLDER / f"{NAME}-{describe_machine('cpu').name}.json"
    return dict(decode_result(file.read_text()).raw) if file.is_file() else {}


def measure_all(given: argparse.Namespace) -> int:
    recorded = read_recorded() if given.record else {}
    started, longest, failed = time.monotonic(), 0.0, 0
    shown = list[dict[str, Any]]()
    for case in given.cases:
        if case.name in recorded.get(case.subject, {}):
            continue
        begun = time.monotonic()
        if given.limit and begun - started + longest > given.limit:
            print(f"no time left for {case.name}", flush=True)
            break
        print(f"--- {case.name}", flush=True)
        try:
            found = measure_case(case, given)
        except Exception:  # noqa: BLE001 - the other cases are measured all the same
            traceback.print_exc()
            failed += 1
            continue
        seconds = time.monotonic() - begun
        longest = max(longest, seconds)
        row = describe(found, given, seconds)
        failed += row["differing"] > 0
        shown.append({"case": case.name, **{key: value for key, value in row.items() if not isinstance(value, dict)}})
        recorded.setdefault(case.subject, {})[case.name] = row
        if given.record:
            publish(given, "exactness_families", recorded, make_figures(recorded), "cpu")
        gc.collect()
    print_table("Families: answers that differ", shown)
    if not given.record:
        publish(given, "exactness_families", recorded, make_figures(recorded), "cpu")
    return 1 if failed else 0


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--cases", type=lambda words: [*map(FamilyCase.parse, words.split(","))], default=list_cases())
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--longest", type=int, default=exactness.LONGEST, help="tokens of a prompt at most")
    parser.add_argument("--answer", type=int, default=exactness.ANSWER, help="tokens of an answer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=0, help="seconds; 0: no limit")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    return measure_all(given)


if __name__ == "__main__":
    sys.exit(main())
