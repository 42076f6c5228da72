"""Compiles the products in C into the package where there is a C compiler for them; the wheel is a pure one elsewhere.

python hatch_build.py     compiles into this source tree, as an editable installation does
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path("adapters/models/kernels/cpu/native")
SOURCES = (
    *("numbers.h", "pool.h", "tiles.h", "steps.h", "fixed.h", "rows.h", "recurrent.h", "odds.h", "keys.h", "amx.h"),
    *("attention.h", "delta.h", "packed.h", "experts.h", "layers.h", "draw.h", "rounds.h", "texts.h"),
    *("sums.h", "frames.h"),
    "products.c",
)
FILE = "librekindle.so"
# Nothing but what is written: no sum in another order, no multiply-add where none is said, no number taken for finite.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math")


def digest(root: Path) -> str:
    """Of the sources, as the library says it of itself."""
    sources = b"\0".join((root / FOLDER / name).read_bytes() for name in SOURCES)
    return hashlib.blake2b(sources, digest_size=8).hexdigest()


def current(root: Path) -> bool:
    """The library is there, of these sources and flags: who installs into this tree again need not wait for it."""
    library = root / FOLDER / FILE
    if "CC" in os.environ or not library.is_file() or library.stat().st_mtime < Path(__file__).stat().st_mtime:
        return False
    try:
        code = ctypes.CDLL(str(library))
        code.rekindle_sources.restype = ctypes.c_char_p
        return bool(code.rekindle_sources().decode("ascii", "replace") == digest(root))
    except (OSError, AttributeError):
        return False


def compiled(root: Path) -> Path | None:
    """The library, in the source tree; None, with a line that says why, where it cannot be made."""
    found = shlex.split(os.environ.get("CC", "")) or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
    if sys.platform not in {"linux", "darwin"} or not found:
        print("rekindle: no C compiler here, so without products of its own", file=sys.stderr)
        return None
    folder = root / FOLDER
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / FILE
        command = [*found, *FLAGS, "-shared", "-fPIC", f'-DSOURCES="{digest(root)}"', "-o", str(made)]
        command += [str(folder / "products.c"), "-lm", "-pthread"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[:3]
            print(f"rekindle: without products of its own, {found[0]} failed: {' | '.join(said)}", file=sys.stderr)
            return None
        beside = folder / f".{FILE}.{os.getpid()}"  # a rename, so that whoever has loaded the old one keeps it
        shutil.copyfile(made, beside)
        beside.replace(folder / FILE)
    return folder / FILE


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand: only hatchling's own builds have it
    BuildHookInterface = object


class NativeBuildHook(BuildHookInterface):
    """Of wheels, editable ones among them. The library is loaded by ctypes, so any Python 3 of the platform will do."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if self.target_name != "wheel" or not ((version == "editable" and current(root)) or compiled(root)):
            return
        from packaging.tags import sys_tags  # noqa: PLC0415 - hatchling brings it

        platforms = (tag.platform for tag in sys_tags())
        own = next(name for name in platforms if "manylinux" not in name and "musllinux" not in name)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{own}"
        build_data["artifacts"].append(f"{FOLDER}/{FILE}")


if __name__ == "__main__":
    sys.exit(0 if compiled(Path(__file__).parent) else 1)
