"""Where a process begins: what takes longest is on its way before anything else is read."""

from __future__ import annotations

import sys

from engine.libraries import opening


def main(argv: list[str] | None = None) -> int:
    """Of the words behind the command's name."""
    words = sys.argv[1:] if argv is None else argv
    with opening(words):
        from engine.commands import carry_out  # noqa: PLC0415 - meanwhile

        return carry_out(words)


if __name__ == "__main__":
    sys.exit(main())
