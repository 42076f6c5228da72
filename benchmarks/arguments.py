"""What benchmarks are told of the server that they measure."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.settings.options import Options, build_options


def server_parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="demo")
    made.add_argument("--draft", default="auto")
    made.add_argument("--device", default="auto")
    made.add_argument("--threads", type=int, default=0)
    made.add_argument("--slots", type=int, default=4)
    made.add_argument("--json", type=Path, help="write the raw figures there, too")
    return made


def options_of(given: argparse.Namespace) -> Options:
    return build_options(
        model=given.model, draft=given.draft, device=given.device, threads=given.threads, slots=given.slots
    )
