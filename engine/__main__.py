"""Where a process begins: what takes longest is on its way before anything else is read."""

from __future__ import annotations

import sys
from typing import NoReturn

from engine.libraries import leave, opening


def main(argv: list[str] | None = None) -> int:
    """Of the words behind the command's name."""
    words = sys.argv[1:] if argv is None else argv
    try:
        with opening(words):
            from engine.commands import carry_out  # noqa: PLC0415 - meanwhile

            return carry_out(words)
    except KeyboardInterrupt:
        return 130


def command() -> NoReturn:
    leave(main())


if __name__ == "__main__":
    command()
