"""`rekindle cache verify`: every file is read to its end."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.text import Text as Line

from adapters.store import survey_folder
from engine.settings.formatting import counted, size
from engine.settings.progress import progress
from engine.tools.cache.cache_folder import looked_at, wide


def verify(path: Path, *, as_json: bool) -> int:
    """1 if a file is damaged. Raises Refusal."""
    damaged: dict[str, str] = {}
    with looked_at(path) as folder:
        found = survey_folder.survey(folder)
        names = sorted([*(one.name for one in found.kept), *found.damaged, *found.unreadable])
        with progress("files read", len(names)) as step:
            for name, wrong in survey_folder.verify(folder, names):
                step()
                if wrong:
                    damaged[name] = wrong
        for name in found.recents:
            if wrong := survey_folder.check_recents(folder, name):
                damaged[name] = wrong
    checked = sum(found.sizes.get(name, 0) for name in names)
    if as_json:
        print(json.dumps({"folder": str(path), "files": len(names), "bytes": checked, "damaged": damaged}, indent=2))
    else:
        console = wide(Console())
        for name, wrong in damaged.items():
            console.print(Line(f"{name}: {wrong}", style="red"), soft_wrap=True)
        console.print(f"{counted(len(names), 'file')} read, {size(checked)}: {len(damaged)} damaged", highlight=False)
    return 1 if damaged else 0
