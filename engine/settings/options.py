"""What a person can choose, in one typed object: from flags, then environment, then a TOML file, then defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import attrs
from attrs import frozen
from cyclopts.validators import Number

from adapters import demo
from effects.scope import Scope, parse_scope
from engine.settings.completion import model_names
from engine.settings.log_format import LogFormat, LogLevel
from engine.settings.option_types import (
    Residency,
    flag,
    known_aliases,
    known_chunk,
    known_curve,
    known_device,
    known_devices,
    known_draft_device,
    known_experts,
    known_host,
    known_key,
    known_names,
    known_origins,
    known_scope,
    known_weights,
    read_curve,
    read_experts,
    residency,
    whole,
)
from engine.settings.placement import Where, misplaced, read_apart, read_devices, read_weights
from engine.settings.user_error import UserError

MODEL = "Model"
SERVER = "Server"
ENGINE = "Engine"
DRAFT = "Speculation"
COMPRESSION = "Compression"
CACHE = "Cache"
TRACE = "Trace"
LOG = "Log"

Device: TypeAlias = str  # auto | cpu | cuda | cuda:N
ToolParser: TypeAlias = Literal["auto", "hermes", "qwen-xml", "llama3-json", "pythonic", "none"]
ReasoningParser: TypeAlias = Literal["auto", "think", "none"]


@frozen
class ModelOption:
    """The one option that needs no flag."""

    model: Annotated[str, flag(MODEL, completer=model_names)] = "demo"
    """Folder of a Hugging Face checkpoint, a GGUF file (the first of several), the name of either in ~/models or in the
    Hugging Face cache (`rekindle models` lists them), or `demo` or `demo-hybrid`, small models that come with it."""


@frozen(kw_only=True)
class Options(ModelOption):
    """Options of `rekindle serve`. Every one can also come from `REKINDLE_<NAME>` or from the `--config` file."""

    alias: Annotated[tuple[str, ...], flag(MODEL, negative="", validator=known_aliases)] = ()
    """A further name that requests may call the model by. May be given several times."""

    any_model: Annotated[bool, flag(MODEL, negative="")] = False
    """Requests may call the model what they like: for clients with a fixed name."""

    tool_parser: Annotated[ToolParser, flag(MODEL)] = "auto"
    """The form of the model's tool calls; auto: what its chat template writes. none: calls stay text."""

    reasoning_parser: Annotated[ReasoningParser, flag(MODEL)] = "auto"
    """How the model marks its reasoning; auto: as its chat template does. none: it stays text."""

    device: Annotated[Device, flag(MODEL, validator=known_device)] = "auto"
    """auto (CUDA where there is one), cpu, cuda or cuda:N."""

    target_devices: Annotated[str, flag(MODEL, validator=known_devices)] = ""
    """In the place of --device: split the model's layers over several, such as cuda:0,cuda:1,cpu:0. The same one may
    come several times. ipc+cpu:0, ipc+cuda:N: in a process of its own; tcp://HOST:PORT: where `rekindle shard` runs."""

    target_layer_split: Annotated[str, flag(MODEL, validator=known_weights)] = ""
    """How much of the layers each of these devices gets, such as 0.4,0.4,0.2; as its free memory says by default."""

    target_shard_ipc_python: Annotated[Path | None, flag(MODEL)] = None
    """Python interpreter of those processes, in which this version of Rekindle is installed, beside another build of
    torch; this one by default. hip:N is such a process, where that build is ROCm's."""

    shard_secret_file: Annotated[Path | None, flag(MODEL)] = None
    """File with the secret that shards at tcp:// know, too; or REKINDLE_SHARD_SECRET in the environment."""

    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], flag(MODEL)] = "auto"
    """What weights and KV are kept and computed in; auto is the checkpoint's own, of GGUF files bfloat16 or float32."""

    kv_dtype: Annotated[Literal["auto", "bf16", "fp8", "int8"], flag(MODEL)] = "auto"
    """What keys and values are kept in; auto: as computed. int8, fp8: half of bfloat16's room, other answers."""

    quantize: Annotated[Literal["none", "int8", "int4"], flag(MODEL)] = "none"
    """int8 or int4: round the matrices of a checkpoint that is not packed, in groups of 128, while it is loaded. For
    trying what a packed one would answer, and what room it would take. The start line tells the error."""

    experts: Annotated[str, flag(MODEL, validator=known_experts)] = "device"
    """Where experts are. device: with their layers. host:N: all in host memory, those that are used most in N GiB of
    the CUDA device, too, the others copied there as they are chosen; host: in half of what is left there."""

    max_ctx: Annotated[int, flag(MODEL, converter=whole, validator=Number(gte=0, lte=1 << 21))] = 0
    """Tokens of prompt and answer together; 0: the model's own limit, or what there is memory for."""

    numerics: Annotated[Literal["exact", "fast"], flag(ENGINE)] = "exact"
    """exact: the same tokens cold, warm, alone and batched, bit for bit. fast: gives that up where it is quicker."""

    slots: Annotated[int, flag(ENGINE, converter=whole, validator=Number(gte=0, lte=64))] = 0
    """Sequences that are on the device at once: requests that run together, and prompts that stay warm. 0: 16 on CUDA
    devices, and elsewhere where they take a quarter of the memory at most, or 8; else four, or as many as there is
    memory for at a good length (`rekindle models` tells)."""

    kv_memory: Annotated[int, flag(ENGINE, converter=whole, validator=Number(gte=0, lte=1 << 30))] = 0
    """MiB for the rows of all sequences, which take pages of 256 rows of it as they grow. 0: --slots times --max-ctx;
    where a CUDA device has not so much, what is free there beside weights and buffers, less a reserve."""

    chunk: Annotated[int, flag(ENGINE, converter=whole, validator=known_chunk)] = 0
    """Rows of a prefill chunk, the largest bucket; 0 is the device's default."""

    threads: Annotated[int, flag(ENGINE, converter=whole, validator=Number(gte=0, lte=1024))] = 0
    """CPU threads for the model; 0 is one per core. Part of the numerics class."""

    draft: Annotated[str, flag(DRAFT)] = "auto"
    """Folder of a DFlash draft that was trained for the model; mtp: the model's own prediction head, if its checkpoint
    has one; none: no draft; auto: what a demo comes with."""

    draft_device: Annotated[Device, flag(DRAFT, validator=known_draft_device)] = ""
    """Where it runs: cpu, cuda or cuda:N; by default where the model's last layers are. ipc+cpu:0, ipc+cuda:N: in a
    process of its own; tcp://HOST:PORT: where `rekindle shard` runs."""

    ddtree: Annotated[bool, flag(DRAFT, negative="")] = False
    """Verify trees of proposals, not chains: more tokens a decode step, more work in each, and the same tokens."""

    ddtree_budget: Annotated[int, flag(DRAFT, converter=whole, validator=Number(gte=1, lte=63))] = 22
    """Proposals of such a tree."""

    draft_residency: Annotated[Residency, flag(DRAFT, converter=residency)] = "auto"
    """Where a draft's and a drafter's weights are while no request needs them. persistent: on the device.
    request-scoped: a draft's are parked in host memory, or given back on the CPU; a drafter's are released.
    auto: on the device, unless its memory is short."""

    lazy_draft: Annotated[bool, flag(DRAFT, negative="")] = False
    """Short for --draft-residency request-scoped."""

    prefill_compression: Annotated[Literal["off", "auto", "always"], flag(COMPRESSION)] = "off"
    """Leave out of prompts what a drafter attends least to; auto: of long ones, where that is quicker."""

    prefill_drafter: Annotated[str, flag(COMPRESSION)] = "auto"
    """Folder or GGUF file of the drafter: any family that is served, with the model's tokenizer; or a demo's name;
    auto: what a demo comes with, unless --prefill-compression is off."""

    prefill_drafter_device: Annotated[Device, flag(COMPRESSION, validator=known_draft_device)] = ""
    """Where it runs: cpu, cuda or cuda:N; the model's own device by default. ipc+cpu:0, ipc+cuda:N: in a process of its
    own; tcp://HOST:PORT: where `rekindle shard` runs, of the drafter."""

    prefill_threshold: Annotated[int, flag(COMPRESSION, converter=whole, validator=Number(gte=0, lte=1 << 21))] = 32_000
    """Tokens of a prompt, beyond what is cached of it, from which auto compresses."""

    prefill_keep_ratio: Annotated[float, flag(COMPRESSION, validator=Number(gte=0.001, lte=1))] = 0.05
    """How much of a prompt is kept."""

    prefill_curve: Annotated[str, flag(COMPRESSION, validator=known_curve)] = ""
    """In the place of a single ratio, ratios by tokens of the prompt, such as 10000:0.5,40000:0.2,100000:0.1."""

    stabilize: Annotated[Literal["off", "known"], flag(SERVER)] = "known"
    """known: what agents write anew into the head of every prompt (counters, dates) is left out, or goes to where it
    costs little. off: nothing is touched."""

    host: Annotated[str, flag(SERVER, validator=known_host)] = "127.0.0.1"
    """Address to listen on. Anything but loopback should come with --api-key."""

    allow_host: Annotated[tuple[str, ...], flag(SERVER, negative="", validator=known_names)] = ()
    """A further name that clients may call this server by, * for any. May be given several times."""

    allow_origin: Annotated[tuple[str, ...], flag(SERVER, negative="", validator=known_origins)] = ()
    """Origin of web pages that may call this server (https://page.example), * for any. May be given several times."""

    port: Annotated[int, flag(SERVER, converter=whole, validator=Number(gte=0, lte=65535))] = 8000
    """Port to listen on; 0 takes a free one."""

    api_key: Annotated[tuple[str, ...], flag(SERVER, negative="", validator=known_key)] = ()
    """A key that clients must send (Authorization: Bearer, or X-Api-Key). May be given several times. Other users of
    this machine see a command line: better use REKINDLE_API_KEY or --api-key-file."""

    api_key_file: Annotated[Path | None, flag(SERVER)] = None
    """File with such keys, one a line, read once at start."""

    max_queue: Annotated[int, flag(SERVER, converter=whole, validator=Number(gte=0, lte=100_000))] = 128
    """Requests that may wait for a slot; more are answered 429."""

    request_timeout: Annotated[float, flag(SERVER, validator=Number(gt=0, lte=86_400))] = 3600
    """Seconds until a request is given up with 504, waiting included."""

    max_body: Annotated[int, flag(SERVER, converter=whole, validator=Number(gte=1, lte=1024))] = 32
    """MiB of a request's body; more is answered 413."""

    grace: Annotated[float, flag(SERVER, validator=Number(gte=0, lte=3600))] = 10
    """Seconds that running requests get to finish on SIGTERM; a second signal stops at once."""

    disk_prefix_cache: Annotated[str, flag(CACHE, validator=known_scope)] = "full"
    """How much is kept. full: prompts and answers. auto:N: what a prompt shares with the likest of the last N, up to
    where a message opens; auto is auto:30. N: the first N tokens. off: the disk is not used."""

    disk_prefix_cache_compress: Annotated[bool, flag(CACHE, negative="")] = False
    """Freeze conversations: messages that have aged are shortened by the drafter, once, and found again so shortened.
    Needs --prefill-compression auto (from --prefill-threshold tokens of them on) or always."""

    kv_cache_dir: Annotated[Path | None, flag(CACHE)] = None
    """Folder that the cache is kept in, for one process at a time; the default is in your user cache directory."""

    kv_cache_budget: Annotated[int, flag(CACHE, converter=whole, validator=Number(gte=0, lte=1 << 30))] = 8192
    """MiB that it may take on disk."""

    host_cache_budget: Annotated[int, flag(CACHE, converter=whole, validator=Number(gte=0, lte=1 << 30))] = 512
    """MiB of memory for prompts that have left the device."""

    kv_cache_codec: Annotated[Literal["zstd", "store", "auto"], flag(CACHE)] = "zstd"
    """zstd: smaller files. store: files as large as their content, for disks that are quicker than decoding. auto:
    whichever was restored sooner at the folder's first start, which is kept there."""

    kv_cache_min_tokens: Annotated[int, flag(CACHE, converter=whole, validator=Number(gte=0, lte=1 << 21))] = 512
    """Less than this many tokens are not kept."""

    kv_cache_cold_max: Annotated[int, flag(CACHE, converter=whole, validator=Number(gte=0, lte=1 << 21))] = 10240
    """Models with recurrent state, full: it is kept at the last message that opens up to here, too, for new
    sessions of the same agent; 0: not."""

    kv_cache_interval: Annotated[int, flag(CACHE, converter=whole, validator=Number(gte=0, lte=1 << 21))] = 10240
    """Models with recurrent state, full: it is kept every so many tokens, and where prefill ends (0: only there)."""

    state_checkpoints: Annotated[int, flag(CACHE, converter=whole, validator=Number(gte=0, lte=1024))] = 8
    """Models with recurrent state: so many earlier states stay on the device, for turns that come back to them; 0:
    none. Each takes 147 MiB with 27B parameters, so 1.2 GiB in all."""

    log_format: Annotated[LogFormat, flag(LOG)] = "text"
    """text: lines for people. json: one object a line, with time, level, logger, message, and what it is about."""

    log_level: Annotated[LogLevel, flag(LOG)] = "info"
    """The least that is logged; debug has every request that only looks."""

    trace: Annotated[Path | None, flag(TRACE)] = None
    """Record everything that happens to FILE (JSON Lines; zstd if it ends in .zst). Holds prompts: see --redact."""

    redact: Annotated[bool, flag(TRACE, negative="")] = False
    """Keep lengths and digests in the trace instead of tokens. It still replays, but cannot be executed again."""

    paranoid: Annotated[bool, flag(TRACE, negative="")] = False
    """Check the engine's invariants after every event, and before rows are gone on from that they are what they were
    when they were written. Rows that have changed are logged as an error and computed again."""

    def __attrs_post_init__(self) -> None:
        """Raises Refusal where two options contradict each other."""
        if self.target_devices and self.device != "auto":
            raise UserError(f"--target-devices names all devices, and --device {self.device} one: leave one out")
        if self.layer_weights and not self.target_devices:
            raise UserError("--target-layer-split shares layers among --target-devices, and there are none: name some")
        if self.layer_weights and len(self.layer_weights) != len(self.devices):
            counts = f"{len(self.layer_weights)} weights for {len(self.devices)} devices"
            raise UserError(f"--target-layer-split {self.target_layer_split[:80]}: {counts}; accepted: one for each")
        apart = (*self.devices, *(one for one in (self.draft_where, self.drafter_where) if one is not None))
        if why := misplaced(apart, interpreter=bool(self.target_shard_ipc_python), secret=bool(self.shard_secret_file)):
            raise UserError(why)
        if self.lazy_draft and self.draft_residency == "persistent":
            raise UserError("--lazy-draft is --draft-residency request-scoped, not persistent: leave one out")
        if not self.drafter and (self.prefill_compression != "off" or self.prefill_drafter_device):
            asked = f"--prefill-compression {self.prefill_compression}, --prefill-drafter-device"
            raise UserError(f"{asked}: there is no model that could score prompts; name one with --prefill-drafter")
        self._check_freezing()
        if self.kv_cache_dir is not None and parse_scope(self.disk_prefix_cache).kind == "off":
            raise UserError("--disk-prefix-cache off uses no folder, and --kv-cache-dir names one: leave one out")

    def _check_freezing(self) -> None:
        if self.disk_prefix_cache_compress and self.prefill_compression == "off":
            how = "shortens messages where --prefill-compression says so, and it is off"
            raise UserError(f"--disk-prefix-cache-compress {how}: accepted with it: auto, always")
        kept = self.kv_cache_budget and parse_scope(self.disk_prefix_cache).kind != "off"
        if self.disk_prefix_cache_compress and not kept:
            where = "keeps what messages were frozen to beside the prefix cache on disk, and --disk-prefix-cache off or"
            raise UserError(f"--disk-prefix-cache-compress {where} --kv-cache-budget 0 declines that: leave one out")

    @property
    def drafter(self) -> str:
        """Folder, file or name of what scores prompts; empty where nothing does."""
        wanted = self.prefill_compression != "off" and self.model in demo.FOLDERS
        return self.prefill_drafter if self.prefill_drafter != "auto" else str(demo.DRAFTER) if wanted else ""

    @property
    def devices(self) -> tuple[Where, ...]:
        """Of the target's shards, in the order of their layers."""
        return read_devices(self.target_devices) if self.target_devices else (Where(self.device, self.device),)

    @property
    def draft_where(self) -> Where | None:
        """Of the draft, where it is in another process."""
        return read_apart(self.draft_device)

    @property
    def drafter_where(self) -> Where | None:
        """The same of the drafter."""
        return read_apart(self.prefill_drafter_device)

    @property
    def layer_weights(self) -> tuple[float, ...]:
        """Of the same; none where free memory decides."""
        return read_weights(self.target_layer_split) if self.target_layer_split else ()

    @property
    def bits(self) -> Literal[0, 4, 8]:
        """That matrices are rounded to; 0: they stay as they are."""
        return {"none": 0, "int4": 4, "int8": 8}[self.quantize]  # type: ignore[return-value] # of exactly these

    @property
    def experts_room(self) -> int | None:
        """Bytes of the device for experts that host memory keeps; 0: half of what is left; None: it keeps none."""
        return read_experts(self.experts)

    @property
    def curve(self) -> tuple[tuple[int, int], ...]:
        """Tokens and thousandths, ascending."""
        return read_curve(self.prefill_curve) if self.prefill_curve else ()

    @property
    def residency(self) -> Residency:
        """The policy that both flags come to."""
        return "request-scoped" if self.lazy_draft else self.draft_residency

    @property
    def scope(self) -> Scope:
        """Of requests that do not say. Without a disk, host memory still keeps everything."""
        asked = parse_scope(self.disk_prefix_cache)
        return Scope("full") if asked.kind == "off" else asked

    def shown(self) -> dict[str, Any]:
        """For the trace's header and /props: everything but secrets."""
        raw = attrs.asdict(self)
        raw["api_key"] = len(self.api_key)
        raw["target_shard_ipc_python"] = None  # an interpreter of this machine
        for name in ("model", "draft", "prefill_drafter", "api_key_file", "kv_cache_dir", "trace", "shard_secret_file"):
            raw[name] = None if raw[name] is None else Path(raw[name]).name
        return raw
