"""How every benchmark says what it measured: the machine, a table for people, raw figures as JSON lines."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# What decides how products are computed: figures of one kind of processor say nothing of another.
FEATURES = ("avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16")


def machine() -> dict[str, Any]:
    """Where this runs, as far as it explains figures."""
    model = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else ""
    kinds = torch.cpu.get_capabilities()
    found = {
        "cpu": model,
        "features": " ".join(name for name in FEATURES if kinds.get(name)),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return {**found, "torch": torch.__version__}


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"\n{title}")
    if not rows:
        return
    names = list(rows[0])
    widths = [max(len(name), *(len(shown(row[name])) for row in rows)) for name in names]
    print("  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True)))
    for row in rows:
        print("  ".join(shown(row[name]).rjust(width) for name, width in zip(names, widths, strict=True)))


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def raw(name: str, figures: Mapping[str, Any]) -> None:
    print(json.dumps({"benchmark": name, **figures}))


def median(values: Iterable[float]) -> float:
    return statistics.median(values)
