"""The model that ships with Rekindle: a Hugging Face folder, this one."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
