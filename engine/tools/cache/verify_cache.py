"""`rekindle cache verify`: reads every file to its end and checks it."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.text import Text as Line

from adapters.store.disk import check_contents, survey_folder
from engine.settings.output.formatting import format_bytes, format_count
from engine.settings.output.progress import count_progress
from engine.tools.cache.cache_folder import make_wide_console, open_for_reading


def verify(path: Path, *, as_json: bool) -> int:
    """Check the folder and return the exit status, 1 if a file is damaged. Raises UserError."""
    with open_for_reading(path) as folder:
        found = survey_folder.survey(folder)
        names = check_contents.list_contents(found)
        with count_progress("files read", len(names)) as step:
            check_contents.check_contents(folder, found, step)
    damaged = found.damaged | found.unreadable
    checked = sum(found.sizes.get(name, 0) for name in names)
    if as_json:
        print(json.dumps({"folder": str(path), "files": len(names), "bytes": checked, "damaged": damaged}, indent=2))
    else:
        console = make_wide_console(Console())
        for name, wrong in damaged.items():
            console.print(Line(f"{name}: {wrong}", style="red"), soft_wrap=True)
        console.print(
            f"{format_count(len(names), 'file')} read, {format_bytes(checked)}: {len(damaged)} damaged", highlight=False
        )
        if found.damaged:
            console.print("`rekindle cache gc` removes what is damaged.", highlight=False)
    return 1 if damaged else 0
