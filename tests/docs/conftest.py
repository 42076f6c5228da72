"""The command line as it is imported: what an earlier test's `main` read of its environment and file is not in it."""

from __future__ import annotations

import pytest

from engine.commands import app


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "config", None)
