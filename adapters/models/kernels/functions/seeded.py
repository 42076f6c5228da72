"""Random numbers that are the same at every start."""

from __future__ import annotations

import torch


def make_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator on `device` that starts from `seed`."""
    return torch.Generator(device).manual_seed(seed)
