"""The command line options that all training commands share, and their checks."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from adapters.processors import count_processors


def build_parser(description: str | None, out: Path) -> argparse.ArgumentParser:
    """Return a parser with the common options. out: the default of `--out`, a folder inside the package."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out, help="checkpoint folder to write (default: the package's own)")
    parser.add_argument("--work", type=Path, default=Path(".train"), help="keeps the corpus and the tokenizer")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of training")
    parser.add_argument("--workers", type=int, default=max(1, count_processors() - 2), help="processes for batches")
    parser.add_argument("--first", type=int, default=0, help="begin with this stage, from what is in --out")
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps of everything; give another --out")
    return parser


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line. Exits with a message if it would overwrite the package, or if there is no GPU."""
    given = parser.parse_args()
    if given.smoke and given.out == parser.get_default("out"):
        parser.error("--smoke would overwrite what the package ships: give another --out")
    if not given.smoke and not torch.cuda.is_available():
        parser.error("training needs a CUDA device; --smoke works without")
    return given
