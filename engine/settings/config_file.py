"""Reads options of `rekindle serve` from sources other than its command line: the environment, and a TOML file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import cyclopts

from engine.settings.options import Options
from engine.settings.user_error import UserError


def list_config_sources(argv: list[str]) -> tuple[Any, ...]:
    """Return the sources for `serve` and `fleet`: the environment, then the TOML file that `--config` (or
    REKINDLE_CONFIG) names.
    """
    if argv[:1] not in (["serve"], ["fleet"]):
        return ()
    path = os.environ.get("REKINDLE_CONFIG")
    for at, word in enumerate(argv):
        if word.startswith("--config="):
            path = word.partition("=")[2]
        elif word == "--config" and at + 1 < len(argv):
            path = argv[at + 1]
    sources: list[Any] = [cyclopts.config.Env("REKINDLE_", command=False)]
    if path:
        check_no_tables(path)
        sources.append(cyclopts.config.Toml(path, must_exist=True, use_commands_as_keys=False))
    return tuple(sources)


def check_no_tables(path: str) -> None:
    """Refuse tables in the file: cyclopts would take one for a command's own and ignore it."""
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: {error}") from error
    for name, value in raw.items():
        if isinstance(value, dict):
            raise UserError(f"{path}: [{name}]: write options at the top of the file, without a table")


def parse_values(values: Mapping[str, Any]) -> Options:
    """Return options from values by flat name, validated as flags are. Raises cyclopts.CycloptsError."""
    parser = cyclopts.App(config=(), result_action="return_value")

    @parser.default
    def options(options: Annotated[Options, cyclopts.Parameter(name="*")] = Options()) -> Options:  # noqa: B008 - as cyclopts has it
        return options

    found: Options = parser(list_words(values), exit_on_error=False, print_error=False)
    return found


def list_words(values: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line for values by flat name. An option with several values comes several times."""
    items = ((name, value if isinstance(value, (list, tuple)) else [value]) for name, value in values.items())
    return [f"--{name.replace('_', '-')}={value}" for name, several in items for value in several]
