"""The models that ship with Rekindle: Hugging Face folders, this one and those inside it."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
FOLDERS = {"demo": FOLDER, "demo-hybrid": FOLDER / "hybrid"}
"""By the names that they are served under."""

DRAFTER = FOLDER / "drafter"
"""Scores prompts for any of them: they have one tokenizer."""
