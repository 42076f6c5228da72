"""Options of `rekindle serve` about the server around the model: HTTP, the prefix cache, the log and the trace.

`model_options.py` has the other groups and says what a field and the string below it become.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from attrs import frozen
from cyclopts.validators import Number

from effects.scope import Scope, parse_scope
from engine.settings.log_format import LogFormat, LogLevel
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
    flag,
    parse_integer,
)
from engine.settings.user_error import UserError


@frozen(kw_only=True)
class HttpOptions:
    """The options of the HTTP server: where it listens, which clients it serves, and the limits of their requests."""

    stabilize: Annotated[Literal["off", "known"], flag(SERVER)] = "known"
    """known: what agents write anew into the head of every prompt (counters, dates) is left out, or goes to where it
    costs little. off: nothing is touched."""

    host: Annotated[str, flag(SERVER, validator=check_host)] = "127.0.0.1"
    """Address to listen on. Anything but loopback should come with --api-key."""

    allow_host: Annotated[tuple[str, ...], flag(SERVER, negative="", validator=check_names)] = ()
    """A further name that clients may call this server by, * for any. May be given several times."""

    allow_origin: Annotated[tuple[str, ...], flag(SERVER, negative="", validator=check_origins)] = ()
    """Origin of web pages that may call this server (https://page.example), * for any. May be given several times."""

    port: Annotated[int, flag(SERVER, converter=parse_integer, validator=Number(gte=0, lte=65535))] = 8000
    """Port to listen on; 0 takes a free one."""

    api_key: Annotated[tuple[str, ...], flag(SERVER, negative="", validator=check_keys)] = ()
    """A key that clients must send (Authorization: Bearer, or X-Api-Key). May be given several times. Other users of
    this machine see a command line: better use REKINDLE_API_KEY or --api-key-file."""

    api_key_file: Annotated[Path | None, flag(SERVER)] = None
    """File with such keys, one a line, read once at start."""

    max_queue: Annotated[int, flag(SERVER, converter=parse_integer, validator=Number(gte=0, lte=100_000))] = 128
    """Requests that may wait for a slot; more are answered 429."""

    request_timeout: Annotated[float, flag(SERVER, validator=Number(gt=0, lte=86_400))] = 3600
    """Seconds until a request is given up with 504, waiting included."""

    max_body: Annotated[int, flag(SERVER, converter=parse_integer, validator=Number(gte=1, lte=1024))] = 32
    """MiB of a request's body; more is answered 413."""

    grace: Annotated[float, flag(SERVER, validator=Number(gte=0, lte=3600))] = 10
    """Seconds that running requests get to finish on SIGTERM; a second signal stops at once."""


@frozen(kw_only=True)
class CacheOptions:
    """The prefix cache in host memory and on disk, and the states that recurrent models keep for it."""

    disk_prefix_cache: Annotated[str, flag(CACHE, validator=check_scope)] = "full"
    """How much is kept. full: prompts and answers. auto:N: what a prompt shares with the likest of the last N, up to
    where a message opens; auto is auto:30. N: the first N tokens. off: the disk is not used."""

    disk_prefix_cache_compress: Annotated[bool, flag(CACHE, negative="")] = False
    """Freeze conversations: messages that have aged are shortened by the drafter, once, and found again so shortened.
    Needs --prefill-compression auto (from --prefill-threshold tokens of them on) or always."""

    kv_cache_dir: Annotated[Path | None, flag(CACHE)] = None
    """Folder that the cache is kept in, for one process at a time; the default is in your user cache directory."""

    kv_cache_budget: Annotated[int, flag(CACHE, converter=parse_integer, validator=Number(gte=0, lte=1 << 30))] = 8192
    """MiB that it may take on disk."""

    host_cache_budget: Annotated[int, flag(CACHE, converter=parse_integer, validator=Number(gte=0, lte=1 << 30))] = 512
    """MiB of memory for prompts that have left the device."""

    kv_cache_codec: Annotated[Literal["zstd", "store", "auto"], flag(CACHE)] = "zstd"
    """zstd: smaller files. store: files as large as their content, for disks that are quicker than decoding. auto:
    whichever was restored sooner at the folder's first start, which is kept there."""

    kv_cache_min_tokens: Annotated[int, flag(CACHE, converter=parse_integer, validator=Number(gte=0, lte=1 << 21))] = (
        512
    )
    """Less than this many tokens are not kept."""

    kv_cache_cold_max: Annotated[int, flag(CACHE, converter=parse_integer, validator=Number(gte=0, lte=1 << 21))] = (
        10240
    )
    """Models with recurrent state, full: it is kept at the last message that opens up to here, too, for new
    sessions of the same agent; 0: not."""

    kv_cache_interval: Annotated[int, flag(CACHE, converter=parse_integer, validator=Number(gte=0, lte=1 << 21))] = (
        10240
    )
    """Models with recurrent state, full: it is kept every so many tokens, and where prefill ends (0: only there)."""

    state_checkpoints: Annotated[int, flag(CACHE, converter=parse_integer, validator=Number(gte=0, lte=1024))] = 8
    """Models with recurrent state: so many earlier states stay on the device, for turns that come back to them; 0:
    none. Each takes 147 MiB with 27B parameters, so 1.2 GiB in all."""

    def __attrs_post_init__(self) -> None:
        """Raise UserError if a cache folder is named, but the disk is not used."""
        if self.kv_cache_dir is not None and not self.uses_disk:
            raise UserError("--disk-prefix-cache off uses no folder, and --kv-cache-dir names one: leave one out")

    @property
    def uses_disk(self) -> bool:
        """True if `--disk-prefix-cache` lets the cache use a disk. The budget may still be 0."""
        return parse_scope(self.disk_prefix_cache).kind != "off"

    @property
    def default_scope(self) -> Scope:
        """The scope of requests that do not name one. Host memory still keeps everything if no disk is used."""
        return parse_scope(self.disk_prefix_cache) if self.uses_disk else Scope("full")


@frozen(kw_only=True)
class DiagnosticOptions:
    """The log, the trace, and the checks of invariants."""

    log_format: Annotated[LogFormat, flag(LOG)] = "text"
    """text: lines for people. json: one object a line, with time, level, logger, message, and what it is about."""

    log_level: Annotated[LogLevel, flag(LOG)] = "info"
    """The least that is logged; debug has every request that only looks."""

    trace: Annotated[Path | None, flag(TRACE)] = None
    """Record everything that happens to FILE (JSON Lines; zstd if it ends in .zst). Holds prompts: see --redact."""

    redact: Annotated[bool, flag(TRACE, negative="")] = False
    """Keep lengths and digests in the trace instead of tokens. It still replays, but cannot be executed again."""

    paranoid: Annotated[bool, flag(TRACE, negative="")] = False
    """Check the engine's invariants after every event."""
