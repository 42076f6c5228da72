"""Options of `rekindle serve` about the model, in groups: one attrs class for each part of the server that reads them.

The command line, the environment and the configuration file stay flat: cyclopts takes the fields of all groups as if
they stood in one class (`options.py` puts the groups together, `server_options.py` has the other groups). The name of
a field is the name of its flag. The string below a field is its text in `--help` and in `docs/REFERENCE.md`, and the
order of groups and fields is the order there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from attrs import frozen
from cyclopts.validators import Number

from engine.settings.completion import model_names
from engine.settings.option_types import (
    COMPRESSION,
    DRAFT,
    ENGINE,
    MODEL,
    Device,
    ReasoningParser,
    Residency,
    ToolParser,
    check_aliases,
    check_chunk,
    check_cpu_experts,
    check_curve,
    check_device,
    check_devices,
    check_draft_device,
    check_experts,
    check_kv_dtype,
    check_weights,
    flag,
    parse_integer,
    parse_residency,
    read_cpu_experts,
    read_curve,
    read_experts,
)
from engine.settings.placement import DeviceLocation, read_devices, read_remote_location, read_weights
from engine.settings.user_error import UserError


@frozen
class ModelName:
    """The model's name, which is the only option that may stand on the command line without its flag."""

    model: Annotated[str, flag(MODEL, completer=model_names)] = "demo"
    """The model to serve. A folder with a Hugging Face checkpoint, a GGUF file (the first one of several), or a name in
    ~/models or in the Hugging Face cache, as `rekindle models` lists them. `demo` and `demo-hybrid` are small models
    that come with the package."""


@frozen(kw_only=True)
class ModelOptions(ModelName):
    """The options that choose the served model, its names in requests, and how its answers are parsed."""

    alias: Annotated[tuple[str, ...], flag(MODEL, negative="", validator=check_aliases)] = ()
    """Another name that requests may use for the model. May be given several times."""

    any_model: Annotated[bool, flag(MODEL, negative="")] = False
    """Accept any model name in requests. For clients that always send a fixed name."""

    tool_parser: Annotated[ToolParser, flag(MODEL)] = "auto"
    """The format of the model's tool calls. auto: the one that its chat template writes. none: tool calls stay text."""

    reasoning_parser: Annotated[ReasoningParser, flag(MODEL)] = "auto"
    """How the model marks its reasoning. auto: as its chat template does. none: reasoning stays text."""


@frozen(kw_only=True)
class PlacementOptions:
    """The devices that hold the layers of the target model, and the processes that those belong to."""

    device: Annotated[Device, flag(MODEL, validator=check_device)] = "auto"
    """The device that computes: auto (CUDA if there is a CUDA device), cpu, cuda or cuda:N."""

    target_devices: Annotated[str, flag(MODEL, validator=check_devices)] = ""
    """Split the layers of the model over several devices, such as cuda:0,cuda:1,cpu:0; replaces --device. A device may
    be named several times. ipc+cpu:0 and ipc+cuda:N compute in a process of their own; tcp://HOST:PORT is a running
    `rekindle shard`."""

    target_layer_split: Annotated[str, flag(MODEL, validator=check_weights)] = ""
    """The share of the layers that each of these devices gets, such as 0.4,0.4,0.2. By default free memory decides."""

    target_shard_ipc_python: Annotated[Path | None, flag(MODEL)] = None
    """Python interpreter of the ipc+ processes. It needs the same version of Rekindle, and may have another build of
    torch. By default the interpreter of the server. hip:N means such a process whose torch is built for ROCm."""

    shard_secret_file: Annotated[Path | None, flag(MODEL)] = None
    """File with the secret that shards at tcp:// share with the server. The variable REKINDLE_SHARD_SECRET does the
    same."""

    def __attrs_post_init__(self) -> None:
        """Raise UserError if two options contradict each other."""
        if self.target_devices and self.device != "auto":
            raise UserError(
                f"--target-devices already names all devices, so --device {self.device} is too much: leave one out"
            )
        if self.layer_weights and not self.target_devices:
            raise UserError("--target-layer-split needs --target-devices: name the devices")
        if self.layer_weights and len(self.layer_weights) != len(self.locations):
            counts = f"{len(self.layer_weights)} weights for {len(self.locations)} devices"
            raise UserError(
                f"--target-layer-split {self.target_layer_split[:80]}: {counts}; accepted: one weight for each device"
            )

    @property
    def locations(self) -> tuple[DeviceLocation, ...]:
        """The location of each shard of the target, in the order of the layers."""
        return read_devices(self.target_devices) if self.target_devices else (DeviceLocation(self.device, self.device),)

    @property
    def layer_weights(self) -> tuple[float, ...]:
        """The relative number of layers of each shard. Empty if free memory decides."""
        return read_weights(self.target_layer_split) if self.target_layer_split else ()


@frozen(kw_only=True)
class WeightOptions:
    """The formats in which weights and cached rows are stored, and where expert weights are stored."""

    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], flag(MODEL)] = "auto"
    """Number format of weights and computation. auto: the checkpoint's own format; for GGUF files bfloat16 or
    float32."""

    kv_dtype: Annotated[str, flag(MODEL, validator=check_kv_dtype)] = "auto"
    """Number format of cached keys and values: auto (the format of computation), bf16, fp8, int8, int4 or int3.5. int8
    and fp8 take half the memory of bfloat16, int4 and int3.5 about a quarter; each gives other answers. k=int8,v=int4
    gives keys and values a format each."""

    quantize: Annotated[Literal["none", "int8", "int4"], flag(MODEL)] = "none"
    """Round an unpacked checkpoint to 8 or 4 bits while it is loaded, in groups of 128 numbers. This shows what a
    packed checkpoint would answer and how much memory it would take. The start line reports the rounding error."""

    experts: Annotated[str, flag(MODEL, validator=check_experts)] = "device"
    """Where the weights of experts are kept. device: with their layers. host:N: all in host memory, and the most used
    ones also in N GiB of the CUDA device; the others are copied when they are chosen. host: half of the free device
    memory instead of N GiB."""

    cpu_experts: Annotated[str, flag(MODEL, validator=check_cpu_experts)] = "auto"
    """The number of first layers whose experts stay in host memory and are computed on the CPU. auto: none if the
    weights fit the CUDA device; else as many as it takes, unless bringing experts to the device (--experts host) is
    quicker here. The number changes rounding, so it is part of the model's identity."""

    @property
    def cpu_expert_layers(self) -> int | None:
        """The number of first layers whose experts the host computes. None: measured times decide."""
        return read_cpu_experts(self.cpu_experts)

    @property
    def quantized_bits(self) -> Literal[0, 4, 8]:
        """The number of bits that matrices are rounded to. 0 means that they are not rounded."""
        return {"none": 0, "int4": 4, "int8": 8}[self.quantize]  # type: ignore[return-value] # of exactly these

    @property
    def device_expert_bytes(self) -> int | None:
        """Device memory for copies of experts that host memory holds, in bytes. 0 means half of the free memory.

        None means that host memory holds no experts.
        """
        return read_experts(self.experts)


@frozen(kw_only=True)
class RuntimeOptions:
    """The limits that memory and threads are planned by: context, slots, pages, chunks, and the numerics."""

    max_ctx: Annotated[int, flag(MODEL, converter=parse_integer, validator=Number(gte=0, lte=1 << 21))] = 0
    """Maximum tokens of prompt and answer together. 0: the limit of the model, or what fits into memory."""

    numerics: Annotated[Literal["exact", "fast"], flag(ENGINE)] = "exact"
    """exact: the same tokens cold, continued, alone and batched, bit for bit. fast: give this up where that is
    quicker."""

    slots: Annotated[int, flag(ENGINE, converter=parse_integer, validator=Number(gte=0, lte=64))] = 0
    """Sequences that the device holds at once: running requests, and prompts that stay warm. 0: what memory allows. On
    CUDA devices, whose slots share memory, these are 64 or 32 if there is memory for 512 tokens in each, otherwise 16
    or fewer. More than 16 requests run at once if there is memory for their prompts and max_tokens. On a CPU they are
    16 or 8 if these take at most a quarter of the memory, otherwise four or fewer. `rekindle models` shows the
    number."""

    latency_target: Annotated[int, flag(ENGINE, converter=parse_integer, validator=Number(gte=0, lte=1000))] = 40
    """Milliseconds from one token of an answer to the next one that are acceptable while prompts of other requests
    wait. More: prompts are read sooner, and all requests together get more tokens per second. Less: answers go on more
    quickly meanwhile. 0: decode steps are never held back."""

    kv_memory: Annotated[int, flag(ENGINE, converter=parse_integer, validator=Number(gte=0, lte=1 << 30))] = 0
    """MiB for the keys and values of all sequences, which use it in pages of 256 tokens. 0: enough for --slots times
    --max-ctx, or on a smaller CUDA device what weights, buffers and a reserve leave."""

    chunk: Annotated[int, flag(ENGINE, converter=parse_integer, validator=check_chunk)] = 0
    """Maximum tokens that one prefill step computes, a power of two from 64 to 4096. 0: on CUDA 1024, 2048 for models
    with heads of 256 and no windows, or 4096 for models with experts; on a CPU 256."""

    threads: Annotated[int, flag(ENGINE, converter=parse_integer, validator=Number(gte=0, lte=1024))] = 0
    """CPU threads for the model. 0: one for each core. A different number makes a different numerics class."""


@frozen(kw_only=True)
class SpeculationOptions:
    """The draft model and how its proposals are verified."""

    draft: Annotated[str, flag(DRAFT)] = "auto"
    """Draft for speculative decoding. A folder or GGUF file with an EAGLE-3, DFlash, DFlash 2 or DSpark draft that was
    trained for the model, or a folder with a Gemma 4 assistant; mtp: the prediction head in the model's own checkpoint;
    suffix: no model, but copies of what followed earlier text that ended in the same way; none: no proposals; auto: the
    draft of a demo model, otherwise suffix. FOLDER+suffix, mtp+suffix and auto+suffix have both."""

    draft_device: Annotated[Device, flag(DRAFT, validator=check_draft_device)] = ""
    """Device of the draft: cpu, cuda or cuda:N. By default the device of the model's last layers. ipc+cpu:0 and
    ipc+cuda:N use a process of their own; tcp://HOST:PORT is a running `rekindle shard`."""

    ddtree: Annotated[bool, flag(DRAFT, negative="")] = False
    """Verify trees of proposals instead of chains. A decode step then accepts more tokens and takes longer. Answers
    stay the same."""

    ddtree_budget: Annotated[int, flag(DRAFT, converter=parse_integer, validator=Number(gte=1, lte=63))] = 22
    """Number of proposals in a tree."""

    draft_residency: Annotated[Residency, flag(DRAFT, converter=parse_residency)] = "auto"
    """Where the weights of the draft and the drafter are while no request needs them. persistent: on the device.
    request-scoped: the draft moves to host memory (on a CPU it is released), the drafter is released. auto: on the
    device, unless its memory is short."""

    lazy_draft: Annotated[bool, flag(DRAFT, negative="")] = False
    """Short for --draft-residency request-scoped."""

    def __attrs_post_init__(self) -> None:
        """Raise UserError if two options contradict each other."""
        if self.lazy_draft and self.draft_residency == "persistent":
            raise UserError("--lazy-draft means --draft-residency request-scoped, not persistent: leave one out")

    @property
    def remote_location(self) -> DeviceLocation | None:
        """The location of the draft if it runs in another process, else None."""
        return read_remote_location(self.draft_device)

    @property
    def residency_policy(self) -> Residency:
        """The policy that `--draft-residency` and its short form `--lazy-draft` ask for together."""
        return "request-scoped" if self.lazy_draft else self.draft_residency


@frozen(kw_only=True)
class CompressionOptions:
    """The options of prompt compression: when, with which model, and how much is kept."""

    prefill_compression: Annotated[Literal["off", "auto", "always"], flag(COMPRESSION)] = "off"
    """Shorten prompts by leaving out what matters least. auto: only long prompts, where that is quicker. always: every
    prompt that may be compressed. Compression changes answers."""

    prefill_drafter: Annotated[str, flag(COMPRESSION)] = "auto"
    """The drafter, a small model that scores the prompt: a folder or GGUF file of any supported family with the model's
    tokenizer, or the name of a demo. auto: the drafter of a demo model, if compression is on."""

    prefill_drafter_device: Annotated[Device, flag(COMPRESSION, validator=check_draft_device)] = ""
    """Device of the drafter: cpu, cuda or cuda:N. By default the device of the model. ipc+cpu:0 and ipc+cuda:N use a
    process of their own; tcp://HOST:PORT is a running `rekindle shard` that serves the drafter."""

    prefill_threshold: Annotated[
        int, flag(COMPRESSION, converter=parse_integer, validator=Number(gte=0, lte=1 << 21))
    ] = 32_000
    """auto compresses prompts from this many tokens on. Cached tokens do not count."""

    prefill_keep_ratio: Annotated[float, flag(COMPRESSION, validator=Number(gte=0.001, lte=1))] = 0.05
    """Share of the prompt that compression keeps."""

    prefill_curve: Annotated[str, flag(COMPRESSION, validator=check_curve)] = ""
    """Keep ratios by prompt length instead of a single ratio, such as 10000:0.5,40000:0.2,100000:0.1."""

    @property
    def remote_location(self) -> DeviceLocation | None:
        """The location of the prompt scorer if it runs in another process, else None."""
        return read_remote_location(self.prefill_drafter_device)

    @property
    def keep_ratio_curve(self) -> tuple[tuple[int, int], ...]:
        """Pairs of a prompt length in tokens and a keep ratio in thousandths, ascending by length."""
        return read_curve(self.prefill_curve) if self.prefill_curve else ()
