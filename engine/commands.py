"""The command line: what each command is called, takes and tells. One sentence per mistake, and exit status 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import App, Parameter

import engine
from engine.serving.shard_launch import shard
from engine.settings import completion as shells
from engine.settings import log_format as logs
from engine.settings.config_file import configuration
from engine.settings.fit_options import FitOptions
from engine.settings.option_types import Quiet, Shell, known_device
from engine.settings.options import Device, Options
from engine.settings.user_error import UserError, told
from engine.tools.bench.bench_commands import bench
from engine.tools.cache.cache_commands import cache
from engine.tools.chat.chat_options import ChatOptions
from engine.tools.simulation.simulation_options import Wanted
from engine.tools.timeline.trace_commands import trace

HELP = """A local LLM inference server that starts warm, never changes the answer, and replays everything.

`rekindle serve`

`rekindle serve --help`

`rekindle completion`
"""
app = App(
    name="rekindle",
    help=HELP,
    version=lambda: f"rekindle {engine.__version__}",
)


@app.command(sort_key=1)
def serve(
    options: Annotated[Options, Parameter(name="*")] = Options(),  # noqa: B008 - a frozen value
    *,
    config: Annotated[Path | None, Parameter(group="Server")] = None,
) -> int:
    """Serve a model over an OpenAI-compatible API.

    `rekindle serve`

    `rekindle serve ~/models/Qwen3-4B --device cuda --max-ctx 32768`

    `rekindle serve --trace today.jsonl.zst`

    Parameters
    ----------
    config
        TOML file with the same names: `port = 8080`, `api-key = ["..."]`.
    """
    del config  # read before the command line was
    from engine.settings import start_progress  # noqa: PLC0415 - what only a server needs would keep `--help` waiting
    from engine.settings.import_order import first_gpu, import_beside_torch  # noqa: PLC0415
    from engine.settings.paths import weight_folders  # noqa: PLC0415
    from engine.settings.preflight import check_address, prepared  # noqa: PLC0415

    logs.configure(options.log_format, options.log_level)
    options = prepared(options)
    check_address(options)
    with start_progress.Steps(options.log_format == "json") as steps:
        with start_progress.importing():
            steps(start_progress.IMPORT)
            import_beside_torch(weight_folders(options), first_gpu(options.devices))
            from engine.loading.load_text import begin_text  # noqa: PLC0415 - what it needs has been imported

            reading = begin_text(options)
            from engine.loading.background_load import begin  # noqa: PLC0415 - torch takes seconds to import

            beginning = begin(options, steps)
            from engine.serving.serve import run  # noqa: PLC0415 - meanwhile
        return run(options, steps, beginning, reading)


@app.command(sort_key=2)
def chat(
    model: Annotated[str, Parameter(show_default=False, completer=shells.model_names)] = "",
    /,
    *,
    options: Annotated[ChatOptions, Parameter(name="*")] = ChatOptions(),  # noqa: B008 - a frozen value
) -> int:
    """Talk to a model in the terminal. Ctrl-C ends an answer, Ctrl-D the conversation; /help lists the rest.

    Where no server runs, one is started for as long as that takes. A prompt from a pipe is answered, and that is all.

    `rekindle chat`

    `rekindle chat ~/models/Qwen3-4B --system "Answer in one sentence."`

    `rekindle chat gpt-4o --url https://api.openai.com`

    `rekindle chat < prompt.txt > answer.md`

    Parameters
    ----------
    model
        As `rekindle serve` takes it, or as the server calls it; by default the first one that it has.
    """
    from engine.tools.chat.chat_loop import run  # noqa: PLC0415

    return run(model, options)


@app.command(sort_key=3)
def models(
    *,
    options: Annotated[FitOptions, Parameter(name="*")] = FitOptions(),  # noqa: B008 - a frozen value
    json_: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """List the models that are here: what they are, whether they fit, with how much context in how many slots.

    They are looked for in ~/models and in the Hugging Face cache. What is told is what `rekindle serve` would do with
    the same options, reckoned from the models' headers: nothing is loaded.

    `rekindle models`

    `rekindle models --device cuda:1 --max-ctx 65536`

    `rekindle models --json`

    Parameters
    ----------
    json_
        Print JSON, and nothing else, on standard output.
    """
    from engine.settings.progress import told_if_slow  # noqa: PLC0415

    with told_if_slow("importing libraries"):
        from engine.tools.list_models import run  # noqa: PLC0415

    return run(options.serving, as_json=json_)


@app.command(sort_key=3)
def replay(
    file: Path,
    *,
    until: int | None = None,
    execute: Annotated[bool, Parameter(negative="")] = False,
    model: str | None = None,
    quiet: Quiet = False,
) -> int:
    """Feed a recorded trace through the engine again and compare every decision. Exit status 0 only if identical.

    Exit status 1 at the first difference, 2 if the file is no trace, 3 if the trace has no end, as a killed server
    leaves it, and everything in it agrees.

    `rekindle replay today.jsonl.zst`

    `rekindle replay today.jsonl.zst --execute`

    `rekindle replay today.jsonl.zst --until 120`

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
    quiet
        Do not tell how far it has got.
    """
    from engine.core.replay import CUT_SHORT, CutShort, Diverged, replay_file, world_json  # noqa: PLC0415
    from engine.core.trace import BadTrace  # noqa: PLC0415
    from engine.settings.progress import quietly  # noqa: PLC0415

    try:
        with quietly(quiet):
            if execute:
                from engine.serving.re_execute import execute_file  # noqa: PLC0415

                done, tokens = execute_file(file, model, until)
            else:
                done, tokens = replay_file(file, until), None
    except BadTrace as error:
        raise UserError(str(error)) from error
    except Diverged as error:
        print(error, file=sys.stderr)
        return CUT_SHORT if isinstance(error, CutShort) else 1
    if until is not None:
        print(json.dumps(world_json(done.world), indent=2))
    else:
        print(done.summary(tokens))
    return 0


@app.command(sort_key=4)
def simulate(
    logs: Annotated[tuple[Path, ...], Parameter(name="LOG", help="Files of requests.")],
    /,
    *,
    wanted: Annotated[Wanted, Parameter(name="*")] = Wanted(),  # noqa: B008 - a frozen value
    quiet: Quiet = False,
) -> int:
    """Try cache policies on requests that were logged: the real engine and index on a virtual clock, no model.

    What format a file has is seen from what is in it: a trace of `rekindle serve --trace`; JSON Lines with
    `timestamp`, `input`, `output` and `session_id`; or a JSON object of token counts, with `requests` and `hash_ids`.
    Any of them may be compressed (.zst).

    `rekindle simulate today.jsonl.zst --scope full,auto,auto:8`

    `rekindle simulate logs/*.json --budget-tokens 1000000 --interleave 8 --restart-every 100 --plot hits.svg`

    Parameters
    ----------
    quiet
        Do not tell how far it has got.
    """
    from engine.settings.progress import quietly  # noqa: PLC0415
    from engine.tools.simulate import run  # noqa: PLC0415

    with quietly(quiet):
        return run(logs, wanted)


app.command(trace)
app.command(cache)
app.command(bench)


@app.command(sort_key=7)
def doctor(
    *,
    device: Annotated[Device, Parameter(validator=known_device)] = "auto",
    kv_cache_dir: Path | None = None,
    json_: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Examine this machine: device, numerics and what is proven, cache folder and its speed, limits, common faults.

    Each fault comes with its remedy. Exit status 1 if there is one; a warning is none.

    `rekindle doctor`

    `rekindle doctor --kv-cache-dir /mnt/fast/kv --json`

    Parameters
    ----------
    device
        auto (CUDA where there is one), cpu, cuda or cuda:N.
    kv_cache_dir
        A --kv-cache-dir; by default the one that `rekindle serve` uses by default.
    json_
        Print JSON, and nothing else, on standard output.
    """
    from engine.settings.progress import told_if_slow  # noqa: PLC0415

    with told_if_slow("importing libraries"):
        from engine.tools.doctor.doctor import run  # noqa: PLC0415

    return run(Options(device=device, kv_cache_dir=kv_cache_dir), as_json=json_)


@app.command(sort_key=9)
def diagram(*, markdown: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Print the transition table as Mermaid.

    `rekindle diagram`

    `rekindle diagram --markdown`

    Parameters
    ----------
    markdown
        The whole page, docs/STATES.md, with every row and what it asks for.
    """
    from states import diagram as draw  # noqa: PLC0415
    from states.table import TABLE  # noqa: PLC0415

    print(draw.render_markdown(TABLE) if markdown else draw.render_mermaid(TABLE), end="")
    return 0


@app.command(sort_key=8)
def completion(
    shell: Shell | None = None, /, *, show: Annotated[bool, Parameter(negative="", show_default=False)] = False
) -> int:
    """Have your shell complete commands, options and what they take: once, for all shells that start from then on.

    `rekindle completion`

    `rekindle completion fish`

    `rekindle completion zsh --show`

    Parameters
    ----------
    shell
        bash, zsh or fish; by default the one that this was typed in.
    show
        Print what it needs, and change no file.
    """
    return shells.complete(app, shell, show=show)


app.command(shard, sort_key=10)


def carry_out(words: list[str]) -> int:
    """A command, by its name and what follows it: its exit status."""
    try:
        app.config = configuration(words)
        status = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except (cyclopts.CycloptsError, UserError) as error:
        return told(error)
    except OSError as error:
        if error.filename is None:
            raise
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror).lower()
        print(f"rekindle: {error.filename}: {reason}", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0
