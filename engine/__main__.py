"""The command line: serve, replay, diagram. One sentence per mistake, and exit status 2."""

from __future__ import annotations

import json
import os
import signal
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import cyclopts
from cyclopts import App, Parameter

from engine import __version__
from engine.options import Options
from engine.refusal import Refusal

app = App(
    name="rekindle",
    help="A local LLM inference server that starts warm, never changes the answer, and replays everything.",
    version=f"rekindle {__version__}",
)


@app.command(sort_key=1)
def serve(
    options: Annotated[Options, Parameter(name="*")] = Options(),  # noqa: B008 - a frozen value
    *,
    config: Annotated[Path | None, Parameter(group="Server")] = None,
) -> int:
    """Serve a model over an OpenAI-compatible API.

    Examples:
      rekindle serve
      rekindle serve ~/models/Qwen3-4B --device cuda --max-ctx 32768
      rekindle serve --trace today.jsonl.zst

    Parameters
    ----------
    config
        TOML file with the same names: `port = 8080`, `api-key = ["..."]`.
    """
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import can swallow a KeyboardInterrupt
    from engine.serve import run  # noqa: PLC0415 - torch takes a second to import

    signal.signal(signal.SIGINT, interrupt)
    del config  # read before the command line was
    return run(options)


@app.command(sort_key=2)
def replay(
    file: Path,
    *,
    until: int | None = None,
    execute: Annotated[bool, Parameter(negative="")] = False,
    model: str | None = None,
) -> int:
    """Feed a recorded trace through the engine again and compare every decision. Exit status 0 only if identical.

    Parameters
    ----------
    file
        A trace from `rekindle serve --trace`.
    until
        Stop after this event and print the world as JSON.
    execute
        Also carry everything out on the real model, and compare the tokens.
    model
        Checkpoint for --execute, if it is no longer where it was.
    """
    from engine.replay import Diverged, replay_file, world_json  # noqa: PLC0415
    from engine.trace import BadTrace  # noqa: PLC0415

    try:
        if execute:
            from engine.execute import execute_file  # noqa: PLC0415

            done, tokens = execute_file(file, model, until)
        else:
            done, tokens = replay_file(file, until), None
    except BadTrace as error:
        raise Refusal(str(error)) from error
    except Diverged as error:
        print(error, file=sys.stderr)
        return 1
    if until is not None:
        print(json.dumps(world_json(done.world), indent=2))
    else:
        print(done.summary(tokens))
    return 0


@app.command(sort_key=3)
def diagram(*, markdown: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Print the transition table as Mermaid.

    Parameters
    ----------
    markdown
        The whole page, docs/STATES.md, with every row and what it asks for.
    """
    from states import diagram as draw  # noqa: PLC0415
    from states.table import TABLE  # noqa: PLC0415

    print(draw.markdown(TABLE) if markdown else draw.mermaid(TABLE), end="")
    return 0


def configuration(argv: list[str]) -> tuple[Any, ...]:
    """Environment, then the TOML file that `--config` (or REKINDLE_CONFIG) names."""
    path = os.environ.get("REKINDLE_CONFIG")
    for at, word in enumerate(argv):
        if word.startswith("--config="):
            path = word.partition("=")[2]
        elif word == "--config" and at + 1 < len(argv):
            path = argv[at + 1]
    sources: list[Any] = [cyclopts.config.Env("REKINDLE_", command=False)]
    if path and argv[:1] == ["serve"]:
        check_file(path)
        sources.append(cyclopts.config.Toml(path, must_exist=True, use_commands_as_keys=False))
    return tuple(sources)


def check_file(path: str) -> None:
    """A table would be taken for a command's own and passed over."""
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Refusal(f"{path}: {error}") from error
    for name, value in raw.items():
        if isinstance(value, dict):
            raise Refusal(f"{path}: [{name}]: options stand at the top of the file, without a table")


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        app.config = configuration(words)
        status = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except cyclopts.CycloptsError as error:
        print(f"rekindle: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except Refusal as error:
        print(f"rekindle: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror).lower()
        print(f"rekindle: {error.filename}: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
