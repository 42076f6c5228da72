"""`rekindle shard`: started by hand, or by the server whose child process it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from adapters import process_memory
from engine.settings.option_types import check_device, check_listen, flag, parse_integer
from engine.settings.output import log_format
from engine.settings.placement import LISTEN, read_listen
from engine.settings.shard_secret import find_shared_secret
from engine.settings.user_error import UserError


def shard(
    model: str = "demo",
    *,
    device: Annotated[str, flag("", validator=check_device)] = "auto",
    draft: str = "auto",
    listen: Annotated[str, flag("", validator=check_listen)] = LISTEN,
    secret_file: Path | None = None,
    threads: Annotated[int, flag("", converter=parse_integer, validator=Number(gte=0, lte=1024))] = 0,
    fd: Annotated[str, Parameter(show=False)] = "",
) -> int:
    """Compute layers of a model, or its draft, for a server in another process or on another machine.

    The server names this shard, as in `rekindle serve MODEL --target-devices cuda:0,tcp://HOST:PORT`, and tells it
    which layers to load. Both need the same model, the same version of Rekindle and the same secret. The connection
    is not encrypted: use a tunnel between machines.

    `REKINDLE_SHARD_SECRET=... rekindle shard ~/models/Qwen3-32B --device cuda:1`

    `rekindle shard ~/models/Qwen3-32B --listen 127.0.0.1:7461 --secret-file ~/.shard-secret`

    Parameters
    ----------
    model
        Folder or GGUF file of the model: the one that the server uses, or a copy.
    device
        auto (CUDA if there is a CUDA device), cpu, cuda or cuda:N.
    draft
        Draft of the model, as in `rekindle serve`. A server that names this shard in --draft-device uses it.
    listen
        HOST:PORT (or tcp://HOST:PORT) to listen on. Port 0: any free port. One server is served at a time.
    secret_file
        File with the secret that servers must know. The variable REKINDLE_SHARD_SECRET does the same.
    threads
        CPU threads; 0 is one per core. Use the number of the server, or the numerics class differs.
    """
    return start_shard(model, device, threads, draft=draft, listen=listen, secret_file=secret_file, descriptors=fd)


def start_shard(
    model: str, device: str, threads: int, *, draft: str, listen: str, secret_file: Path | None, descriptors: str
) -> int:
    """Start a shard. descriptors: of a connection and of shared memory that the server left open; empty if it was
    started by hand.
    """
    log_format.configure("text", "warning" if descriptors else "info")
    secret = find_shared_secret(secret_file).encode()
    process_memory.limit_arenas()
    import torch  # noqa: PLC0415 - takes seconds

    from engine.loading.shard_server import run_launched, run_listening  # noqa: PLC0415

    if threads:
        torch.set_num_threads(threads)
    if not descriptors:
        return run_listening(model, device, draft, read_listen(listen), secret)
    if not all(part.isdecimal() for part in descriptors.split(",")):
        raise UserError("--fd is for a server that starts a shard; use --listen")
    return run_launched(model, device, draft, tuple(map(int, descriptors.split(","))), secret)
