"""`rekindle shard`: started by hand, or by the server whose child process it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from adapters import process_memory
from engine.settings import log_format
from engine.settings.option_types import check_device, check_listen, flag, parse_integer
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
    """Have layers of a model, or its draft, for a server in another process or on another machine.

    The server names it, as in `rekindle serve MODEL --target-devices cuda:0,tcp://HOST:PORT`; which layers, it says
    itself. Both have the same model, the same version of Rekindle and the same secret. What crosses is not encrypted:
    beyond loopback, use a tunnel.

    `REKINDLE_SHARD_SECRET=... rekindle shard ~/models/Qwen3-32B --device cuda:1`

    `rekindle shard ~/models/Qwen3-32B --listen 127.0.0.1:7461 --secret-file ~/.shard-secret`

    Parameters
    ----------
    model
        Folder of the checkpoint, or GGUF file: the server's own, or a copy of it.
    device
        auto (CUDA where there is one), cpu, cuda or cuda:N.
    draft
        As `rekindle serve` has it, for a server that names this one in --draft-device: its draft is here then.
    listen
        HOST:PORT (or tcp://HOST:PORT) where to wait for servers: one is served at a time. Port 0 takes a free one.
    secret_file
        File with the secret that servers have to know; or REKINDLE_SHARD_SECRET in the environment.
    threads
        CPU threads; 0 is one per core. The server's own number, or what is computed here is of another numerics class.
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
    if not all(one.isdecimal() for one in descriptors.split(",")):
        raise UserError("--fd is for a server that starts a shard; use --listen")
    return run_launched(model, device, draft, tuple(map(int, descriptors.split(","))), secret)
