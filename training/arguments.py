"""What the commands that train are told, all alike, and what they refuse."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from adapters.processors import count_processors


def parser(description: str | None, out: Path) -> argparse.ArgumentParser:
    """out: the folder that is written where nobody names another, a part of the package."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=out, help="checkpoint folder to write (by default the package's own)")
    made.add_argument("--work", type=Path, default=Path(".train"), help="keeps the corpus and the tokenizer")
    made.add_argument("--seconds", type=float, default=math.inf, help="of training")
    made.add_argument("--workers", type=int, default=max(1, count_processors() - 2), help="processes for batches")
    made.add_argument("--first", type=int, default=0, help="begin with this stage, from what is in --out")
    made.add_argument("--smoke", action="store_true", help="a few tiny steps of everything; give another --out")
    return made


def parsed(told: argparse.ArgumentParser) -> argparse.Namespace:
    given = told.parse_args()
    if given.smoke and given.out == told.get_default("out"):
        told.error("--smoke would overwrite what the package ships: give another --out")
    if not given.smoke and not torch.cuda.is_available():
        told.error("training needs a CUDA device; --smoke works without")
    return given
