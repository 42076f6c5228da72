"""The commands `rekindle cache ls`, `verify` and `gc`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from engine.settings.option_types import Quiet

CACHE = """List, check and shrink the folder in which prompts are kept.

`rekindle cache ls --text`
"""
cache = App(name="cache", help=CACHE, sort_key=5)
Folder = Annotated[Path | None, Parameter(name="DIR")]


@cache.command(sort_key=1)
def ls(
    folder: Folder = None,
    /,
    *,
    text: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    model: Path | None = None,
    all_: Annotated[bool, Parameter(name="--all", negative="", show_default=False)] = False,
    json_: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """List what is kept: models, sequences, tokens, sizes, hits. A server may use the folder at the same time.

    `rekindle cache ls --text`

    `rekindle cache ls ~/kv --all --json`

    Parameters
    ----------
    folder
        Cache folder. By default the default folder of `rekindle serve`.
    text
        Show the first words of each sequence.
    model
        Checkpoint whose tokenizer makes the text. By default the demo.
    all_
        List every sequence, not only the most recent ones.
    json_
        Print only JSON on standard output.
    """
    from engine.settings.paths import find_cache_folder  # noqa: PLC0415
    from engine.tools.cache.list_cache import ls as show  # noqa: PLC0415

    return show(folder or find_cache_folder(), text=text, model=model, everything=all_, as_json=json_)


@cache.command(sort_key=2)
def verify(
    folder: Folder = None,
    /,
    *,
    json_: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
    quiet: Quiet = False,
) -> int:
    """Read every file and compare every checksum and key. Nothing is changed. Exit status 1 if a file is damaged.

    `rekindle cache verify`

    `rekindle cache verify ~/kv --json`

    Parameters
    ----------
    folder
        Cache folder. By default the default folder of `rekindle serve`.
    json_
        Print only JSON on standard output.
    quiet
        Show no progress.
    """
    from engine.settings.output.progress import silence_progress  # noqa: PLC0415
    from engine.settings.paths import find_cache_folder  # noqa: PLC0415
    from engine.tools.cache.verify_cache import verify as check  # noqa: PLC0415

    with silence_progress(quiet):
        return check(folder or find_cache_folder(), as_json=json_)


@cache.command(sort_key=3)
def gc(
    folder: Folder = None,
    /,
    *,
    budget: Annotated[int | None, Parameter(validator=Number(gte=0, lte=1 << 30))] = None,
    identity: Annotated[str, Parameter(show_default=False)] = "",
    all_: Annotated[bool, Parameter(name="--all", negative="", show_default=False)] = False,
    dry_run: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    quiet: Quiet = False,
) -> int:
    """Remove damaged and unfinished files, and what the options name. All files are read. No server may use the folder.

    `rekindle cache gc --budget 2048`

    `rekindle cache gc --all --dry-run`

    Parameters
    ----------
    folder
        Cache folder. By default the default folder of `rekindle serve`.
    budget
        Shrink the folder to this many MiB. The least useful entries go first, as in the server.
    identity
        Keep only the files of this model: the start of an identity that `ls` shows.
    all_
        Remove everything.
    dry_run
        Only report what would be removed.
    quiet
        Show no progress.
    """
    from engine.settings.output.progress import silence_progress  # noqa: PLC0415
    from engine.settings.paths import find_cache_folder  # noqa: PLC0415
    from engine.tools.cache.collect_garbage import RemovalOptions  # noqa: PLC0415
    from engine.tools.cache.collect_garbage import gc as collect  # noqa: PLC0415

    unwanted = RemovalOptions(None if budget is None else budget << 20, identity, all_)
    with silence_progress(quiet):
        return collect(folder or find_cache_folder(), unwanted, dry_run=dry_run)
