"""Options of `rekindle serve` about the server around the model: HTTP, the prefix cache, the log and the trace.

`model_options.py` has the other groups and says what a field and the string below it become.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from attrs import frozen
from cyclopts.validators import Number

from effects.scope import Scope, parse_scope
from engine.settings.option_types import (
    CACHE,
    LOG,
    SERVER,
    TRACE,
    check_host,
    check_keys,
    check_names,
    check_origins,
    check_scope,
    check_store,
    flag,
    parse_integer,
)
from engine.settings.output.log_format import LogFormat, LogLevel
from engine.settings.user_error import UserError


@frozen(kw_only=True)
class HttpOptions:
    """The options of the HTTP server: where it listens, which clients it serves, and the limits of their requests."""

    stabilize: Annotated[Literal["off", "known"], flag(SERVER)] = "known"
    """known: remove or move the counters and dates that known agents write into every prompt, so that the cache finds
    the prompt again. off: change nothing."""

    host: Annotated[str, flag(SERVER, validator=check_host)] = "127.0.0.1"
    """Address to listen on. Use --api-key-file with any address that is not loopback."""

    allow_host: Annotated[tuple[str, ...], flag(SERVER, negative="", validator=check_names)] = ()
    """Another host name that clients may call this server by; * for any. May be given several times."""

    allow_origin: Annotated[tuple[str, ...], flag(SERVER, negative="", validator=check_origins)] = ()
    """Origin of web pages that may call this server, such as https://page.example; * for any. May be given several
    times."""

    port: Annotated[int, flag(SERVER, converter=parse_integer, validator=Number(gte=0, lte=65535))] = 8000
    """Port to listen on. 0: any free port."""

    api_key: Annotated[tuple[str, ...], flag(SERVER, negative="", validator=check_keys)] = ()
    """Key that clients must send (Authorization: Bearer, or X-Api-Key). May be given several times. Other users of this
    machine can see the command line, so REKINDLE_API_KEY or --api-key-file is better."""

    api_key_file: Annotated[Path | None, flag(SERVER)] = None
    """File with API keys, one on each line. It is read once, at the start."""

    max_queue: Annotated[int, flag(SERVER, converter=parse_integer, validator=Number(gte=0, lte=100_000))] = 128
    """Maximum requests that wait for a slot. Further requests get status 429."""

    request_timeout: Annotated[float, flag(SERVER, validator=Number(gt=0, lte=86_400))] = 3600
    """Seconds after which a request ends with status 504. Waiting counts."""

    max_body: Annotated[int, flag(SERVER, converter=parse_integer, validator=Number(gte=1, lte=1024))] = 32
    """Maximum size of a request body in MiB. Larger bodies get status 413."""

    grace: Annotated[float, flag(SERVER, validator=Number(gte=0, lte=3600))] = 10
    """Seconds that running requests have to finish after SIGTERM. A second signal stops the server at once."""


@frozen(kw_only=True)
class CacheOptions:
    """The prefix cache in host memory and on disk."""

    disk_prefix_cache: Annotated[str, flag(CACHE, validator=check_scope)] = "full"
    """What the cache on disk keeps. full: prompts and answers. auto:N: the part that a prompt shares with the most
    similar one of the last N prompts, up to the start of a message; auto means auto:30. N: the first N tokens. off:
    nothing."""

    disk_prefix_cache_compress: Annotated[bool, flag(CACHE, negative="")] = False
    """Shorten old messages of long conversations with the drafter, once, and keep them shortened (frozen). Needs
    --prefill-compression auto or always; auto freezes from --prefill-threshold tokens on."""

    kv_cache_dir: Annotated[Path | None, flag(CACHE)] = None
    """Folder of the cache on disk. Only one process can use a folder. By default a folder in your user cache
    directory."""

    kv_cache_budget: Annotated[int, flag(CACHE, converter=parse_integer, validator=Number(gte=0, lte=1 << 30))] = 8192
    """Maximum size of the cache on disk in MiB."""

    host_cache_budget: Annotated[int, flag(CACHE, converter=parse_integer, validator=Number(gte=0, lte=1 << 30))] = 512
    """MiB of host memory for prompts that no longer have a slot on the device."""

    kv_cache_codec: Annotated[Literal["zstd", "store", "auto"], flag(CACHE)] = "zstd"
    """How cache files are stored. zstd: compressed. store: uncompressed, for disks that read faster than zstd decodes.
    auto: the one that was restored faster when the folder was first used; the folder remembers it."""

    kv_cache_min_tokens: Annotated[int, flag(CACHE, converter=parse_integer, validator=Number(gte=0, lte=1 << 21))] = (
        512
    )
    """Prompts with fewer tokens are not kept."""

    def __attrs_post_init__(self) -> None:
        """Raise UserError if a cache folder is named, but the disk is not used."""
        if self.kv_cache_dir is not None and not self.uses_disk:
            raise UserError("--disk-prefix-cache off uses no folder, but --kv-cache-dir names one: leave one out")

    @property
    def uses_disk(self) -> bool:
        """True if `--disk-prefix-cache` lets the cache use a disk. The budget may still be 0."""
        return parse_scope(self.disk_prefix_cache).kind != "off"

    @property
    def default_scope(self) -> Scope:
        """The scope of requests that do not name one. Host memory still keeps everything if no disk is used."""
        return parse_scope(self.disk_prefix_cache) if self.uses_disk else Scope("full")


@frozen(kw_only=True)
class SharedTierOptions:
    """The store of objects behind the prefix cache that several servers share."""

    kv_shared_tier: Annotated[str, flag(CACHE, validator=check_store)] = ""
    """Store of objects that several servers share: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or
    file:///folder. Servers of one model restore there what others have read. Credentials come from the environment, as
    the clients of these stores expect them. Needs the extra rekindle[shared]."""

    kv_shared_budget: Annotated[int, flag(CACHE, converter=parse_integer, validator=Number(gte=0, lte=1 << 40))] = 65536
    """Maximum size of one model's prompts in the shared store in MiB; the longest unused go first. 0: no limit."""

    kv_shared_max_age: Annotated[float, flag(CACHE, validator=Number(gt=0, lte=100_000))] = 168
    """Hours after which unused prompts leave the shared store."""


@frozen(kw_only=True)
class CheckpointOptions:
    """The states of recurrent models that are kept for prompts to come, on the device and in the prefix cache."""

    kv_cache_cold_max: Annotated[int, flag(CACHE, converter=parse_integer, validator=Number(gte=0, lte=1 << 21))] = (
        10240
    )
    """For models with recurrent state and full: also keep the state where the last message starts within this many
    tokens, so that new sessions of the same agent find it. 0: do not."""

    kv_cache_interval: Annotated[int, flag(CACHE, converter=parse_integer, validator=Number(gte=0, lte=1 << 21))] = (
        10240
    )
    """For models with recurrent state and full: keep the state every so many tokens, and at the end of the prompt. 0:
    only at the end."""

    state_checkpoints: Annotated[
        int | None, flag(CACHE, converter=parse_integer, validator=Number(gte=0, lte=1024))
    ] = None
    """For models with recurrent state: number of earlier states that stay on the device for turns that return to them.
    0: none. By default 8, and up to 32 that take at most a 25th of a GPU's memory. Each takes 147 MiB in a 27B
    model."""


@frozen(kw_only=True)
class DiagnosticOptions:
    """The log, the trace, and the checks of invariants."""

    log_format: Annotated[LogFormat, flag(LOG)] = "text"
    """text: lines for people. json: one object on each line, with time, level, logger and message."""

    log_level: Annotated[LogLevel, flag(LOG)] = "info"
    """Lowest level that is logged. debug includes requests that only read the status."""

    trace: Annotated[Path | None, flag(TRACE)] = None
    """Record every event in this file (JSON Lines; compressed if the name ends in .zst). It contains prompts: see
    --redact."""

    redact: Annotated[bool, flag(TRACE, negative="")] = False
    """Record lengths and digests instead of tokens. Such a trace still replays, but --execute cannot use it."""

    paranoid: Annotated[bool, flag(TRACE, negative="")] = False
    """Check the invariants of the engine after every event. For debugging: it is slow."""
