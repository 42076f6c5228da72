"""The options that all benchmarks have, and those of benchmarks that serve a model."""

from __future__ import annotations

import argparse

from engine.settings.options import Options, build_options


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser that knows `--record`, which `benchmarks.results.publish` obeys."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    return made


def server_parser(description: str | None) -> argparse.ArgumentParser:
    made = benchmark_parser(description)
    made.add_argument("--model", default="demo")
    made.add_argument("--draft", default="auto")
    made.add_argument("--device", default="auto")
    made.add_argument("--threads", type=int, default=0)
    made.add_argument("--slots", type=int, default=4)
    return made


def options_of(given: argparse.Namespace) -> Options:
    return build_options(
        model=given.model, draft=given.draft, device=given.device, threads=given.threads, slots=given.slots
    )
