"""Random numbers that are the same at every start."""

from __future__ import annotations

from importlib import import_module

import torch


def seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Drawing on `device`. Torch 2.13 makes no generators before a part of its compiler is imported, which `import
    torch` does and a server leaves until it is asked for (`engine/settings/import_order.py`).
    """
    try:
        generator = torch.Generator(device)
    except RuntimeError:
        import_module("torch._prims.rng_prims")
        generator = torch.Generator(device)
    return generator.manual_seed(seed)
