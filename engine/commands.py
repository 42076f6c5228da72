"""The command line: what each command is called, takes and tells. One sentence per mistake, and exit status 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import App, Parameter

import engine
from engine.fleet.fleet_command import fleet
from engine.serving.shard_launch import shard
from engine.settings import completion as shells
from engine.settings.config_file import list_config_sources
from engine.settings.fit_options import FitOptions
from engine.settings.option_types import SERVER, Device, Quiet, Shell, check_device
from engine.settings.options import Options, build_options
from engine.settings.output import log_format as logs
from engine.settings.user_error import UserError, report_error
from engine.tools.bench.bench_commands import bench
from engine.tools.cache.cache_commands import cache
from engine.tools.chat.chat_options import ChatOptions
from engine.tools.simulation.simulation_options import SimulationOptions
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
    config: Annotated[Path | None, Parameter(group=SERVER)] = None,
) -> int:
    """Serve a model over an OpenAI-compatible API.

    `rekindle serve`

    `rekindle serve ~/models/Qwen3-4B --device cuda --max-ctx 32768`

    `rekindle serve --trace today.jsonl.zst`

    Parameters
    ----------
    config
        TOML file with the same option names, such as `port = 8080`.
    """
    del config  # read before the command line was
    from engine.settings.import_order import first_gpu, import_beside_torch  # noqa: PLC0415
    from engine.settings.output import start_progress  # noqa: PLC0415 - what only a server needs would keep `--help` waiting
    from engine.settings.paths import list_weight_folders  # noqa: PLC0415
    from engine.settings.preflight import check_address, prepare_options  # noqa: PLC0415

    logs.configure(options.diagnostics.log_format, options.diagnostics.log_level)
    options = prepare_options(options)
    check_address(options.http)
    with start_progress.StartProgress(options.diagnostics.log_format == "json") as progress:
        with start_progress.speed_up_imports():
            progress(start_progress.IMPORT)
            import_beside_torch(list_weight_folders(options), first_gpu(options.placement.locations))
            from engine.loading.load_text import begin_text  # noqa: PLC0415 - what it needs has been imported

            reading = begin_text(options.model)
            from engine.loading.background_load import begin_load  # noqa: PLC0415 - torch takes seconds to import

            beginning = begin_load(options, progress)
            from engine.serving.serve import run_server  # noqa: PLC0415 - meanwhile
        return run_server(options, progress, beginning, reading)


@app.command(sort_key=2)
def chat(
    model: Annotated[str, Parameter(show_default=False, completer=shells.model_names)] = "",
    /,
    *,
    options: Annotated[ChatOptions, Parameter(name="*")] = ChatOptions(),  # noqa: B008 - a frozen value
) -> int:
    """Chat with a model in the terminal. Ctrl-C ends an answer, Ctrl-D the conversation, /help lists all commands.

    If no server runs, one is started for the conversation. A prompt from a pipe gets one answer.

    `rekindle chat`

    `rekindle chat ~/models/Qwen3-4B --system "Answer in one sentence."`

    `rekindle chat gpt-4o --url https://api.openai.com`

    `rekindle chat < prompt.txt > answer.md`

    Parameters
    ----------
    model
        The model, as in `rekindle serve`, or by the name that a server lists. By default the server's first model.
    """
    from engine.tools.chat.chat_loop import run_chat  # noqa: PLC0415

    return run_chat(model, options)


@app.command(sort_key=3)
def models(
    *,
    options: Annotated[FitOptions, Parameter(name="*")] = FitOptions(),  # noqa: B008 - a frozen value
    json_: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """List the models on this machine, whether they fit into memory, and with how many slots and how much context.

    Models are searched in ~/models and in the Hugging Face cache. The list shows what `rekindle serve` would do with
    the same options. Only the headers of the models are read; nothing is loaded.

    `rekindle models`

    `rekindle models --device cuda:1 --max-ctx 65536`

    `rekindle models --json`

    Parameters
    ----------
    json_
        Print only JSON on standard output.
    """
    from engine.settings.output.progress import announce_if_slow  # noqa: PLC0415

    with announce_if_slow("importing libraries"):
        from engine.tools.list_models import run_models  # noqa: PLC0415

    return run_models(options.serve_options, as_json=json_)


@app.command(sort_key=3)
def replay(
    file: Path,
    *,
    until: int | None = None,
    execute: Annotated[bool, Parameter(negative="")] = False,
    model: str | None = None,
    quiet: Quiet = False,
) -> int:
    """Run a recorded trace through the engine again and compare every decision.

    Exit status 0: identical. 1: a difference, which is shown. 2: the file is no trace. 3: everything agrees, but the
    trace has no end, because its server was killed, could not write on, or still runs.

    `rekindle replay today.jsonl.zst`

    `rekindle replay today.jsonl.zst --execute`

    `rekindle replay today.jsonl.zst --until 120`

    Parameters
    ----------
    file
        A trace from `rekindle serve --trace`.
    until
        Stop after this event and print the state of the engine as JSON.
    execute
        Also compute everything on the real model again, and compare the tokens.
    model
        Checkpoint for --execute, if it has moved since.
    quiet
        Show no progress.
    """
    from engine.core.replay import CUT_SHORT, ReplayDiffers, TraceCutShort, replay_file, world_json  # noqa: PLC0415
    from engine.core.trace import BadTrace  # noqa: PLC0415
    from engine.settings.output.progress import silence_progress  # noqa: PLC0415

    try:
        with silence_progress(quiet):
            if execute:
                from engine.serving.re_execute import execute_file  # noqa: PLC0415

                done, tokens = execute_file(file, model, until)
            else:
                done = replay_file(file, until)
                tokens = None
    except BadTrace as error:
        raise UserError(str(error)) from error
    except ReplayDiffers as error:
        print(error, file=sys.stderr)
        return CUT_SHORT if isinstance(error, TraceCutShort) else 1
    if until is not None:
        print(json.dumps(world_json(done.world), indent=2))
    else:
        print(done.summary(tokens))
    return 0


@app.command(sort_key=4)
def simulate(
    logs: Annotated[tuple[Path, ...], Parameter(name="LOG", help="Files with requests.")],
    /,
    *,
    wanted: Annotated[SimulationOptions, Parameter(name="*")] = SimulationOptions(),  # noqa: B008 - a frozen value
    quiet: Quiet = False,
) -> int:
    """Try cache policies on logged requests: the real engine and cache index, a virtual clock, no model.

    Three formats of logs are read, and any of them may be compressed (.zst): a trace of `rekindle serve --trace`; JSON
    Lines with `timestamp`, `input`, `output` and `session_id`; a JSON object of token counts, with `requests` and
    `hash_ids`.

    `rekindle simulate today.jsonl.zst --scope full,auto,auto:8`

    `rekindle simulate logs/*.json --budget-tokens 1000000 --interleave 8 --restart-every 100 --plot hits.svg`

    Parameters
    ----------
    quiet
        Show no progress.
    """
    from engine.settings.output.progress import silence_progress  # noqa: PLC0415
    from engine.tools.simulate import run  # noqa: PLC0415

    with silence_progress(quiet):
        return run(logs, wanted)


app.command(trace)
app.command(cache)
app.command(bench)


@app.command(sort_key=7)
def doctor(
    *,
    device: Annotated[Device, Parameter(validator=check_device)] = "auto",
    kv_cache_dir: Path | None = None,
    json_: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Check this machine: device, memory, limits, port 8000, cache folder, speed of its disk, numerics.

    Each fault comes with a remedy. Exit status 1 if there is a fault; warnings do not count.

    `rekindle doctor`

    `rekindle doctor --kv-cache-dir /mnt/fast/kv --json`

    Parameters
    ----------
    device
        auto (CUDA if there is a CUDA device), cpu, cuda or cuda:N.
    kv_cache_dir
        Cache folder to check. By default the default folder of `rekindle serve`; REKINDLE_KV_CACHE_DIR and TOML files
        are not read.
    json_
        Print only JSON on standard output.
    """
    from engine.settings.output.progress import announce_if_slow  # noqa: PLC0415

    with announce_if_slow("importing libraries"):
        from engine.tools.doctor.doctor import run_doctor  # noqa: PLC0415

    return run_doctor(build_options(device=device, kv_cache_dir=kv_cache_dir), as_json=json_)


@app.command(sort_key=9)
def diagram(*, markdown: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Print the states of a request and their transitions as a Mermaid diagram.

    `rekindle diagram`

    `rekindle diagram --markdown`

    Parameters
    ----------
    markdown
        Print the whole page docs/STATES.md, with every transition and its effects.
    """
    from states import diagram as draw  # noqa: PLC0415
    from states.table import TABLE  # noqa: PLC0415

    print(draw.render_markdown(TABLE) if markdown else draw.render_mermaid(TABLE), end="")
    return 0


@app.command(sort_key=8)
def completion(
    shell: Shell | None = None, /, *, show: Annotated[bool, Parameter(negative="", show_default=False)] = False
) -> int:
    """Set up completion of commands, options and values in your shell. New shells use it.

    `rekindle completion`

    `rekindle completion fish`

    `rekindle completion zsh --show`

    Parameters
    ----------
    shell
        bash, zsh or fish. By default the shell that runs this command.
    show
        Print the completion script and change no file.
    """
    return shells.install_completion(app, shell, show=show)


app.command(fleet, sort_key=2)
app.command(shard, sort_key=10)


def carry_out(words: list[str]) -> int:
    """Run the command that these words name, print its error, and return the exit status."""
    try:
        app.config = list_config_sources(words)
        status = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except (cyclopts.CycloptsError, UserError) as error:
        return report_error(error)
    except OSError as error:
        if error.filename is None:
            raise
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror).lower()
        print(f"rekindle: {error.filename}: {reason}", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0
