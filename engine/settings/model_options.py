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
    check_curve,
    check_device,
    check_devices,
    check_draft_device,
    check_experts,
    check_weights,
    flag,
    parse_integer,
    parse_residency,
    read_curve,
    read_experts,
)
from engine.settings.placement import DeviceLocation, read_devices, read_remote_location, read_weights
from engine.settings.user_error import UserError


@frozen
class ModelName:
    """The model's name, which is the only option that may stand on the command line without its flag."""

    model: Annotated[str, flag(MODEL, completer=model_names)] = "demo"
    """Folder of a Hugging Face checkpoint, a GGUF file (the first of several), the name of either in ~/models or in the
    Hugging Face cache (`rekindle models` lists them), or `demo` or `demo-hybrid`, small models that come with it."""


@frozen(kw_only=True)
class ModelOptions(ModelName):
    """The options that choose the served model, its names in requests, and how its answers are parsed."""

    alias: Annotated[tuple[str, ...], flag(MODEL, negative="", validator=check_aliases)] = ()
    """A further name that requests may call the model by. May be given several times."""

    any_model: Annotated[bool, flag(MODEL, negative="")] = False
    """Requests may call the model what they like: for clients with a fixed name."""

    tool_parser: Annotated[ToolParser, flag(MODEL)] = "auto"
    """The form of the model's tool calls; auto: what its chat template writes. none: calls stay text."""

    reasoning_parser: Annotated[ReasoningParser, flag(MODEL)] = "auto"
    """How the model marks its reasoning; auto: as its chat template does. none: it stays text."""


@frozen(kw_only=True)
class PlacementOptions:
    """The devices that hold the layers of the target model, and the processes that those belong to."""

    device: Annotated[Device, flag(MODEL, validator=check_device)] = "auto"
    """auto (CUDA where there is one), cpu, cuda or cuda:N."""

    target_devices: Annotated[str, flag(MODEL, validator=check_devices)] = ""
    """In the place of --device: split the model's layers over several, such as cuda:0,cuda:1,cpu:0. The same one may
    come several times. ipc+cpu:0, ipc+cuda:N: in a process of its own; tcp://HOST:PORT: where `rekindle shard` runs."""

    target_layer_split: Annotated[str, flag(MODEL, validator=check_weights)] = ""
    """How much of the layers each of these devices gets, such as 0.4,0.4,0.2; as its free memory says by default."""

    target_shard_ipc_python: Annotated[Path | None, flag(MODEL)] = None
    """Python interpreter of those processes, in which this version of Rekindle is installed, beside another build of
    torch; this one by default. hip:N is such a process, where that build is ROCm's."""

    shard_secret_file: Annotated[Path | None, flag(MODEL)] = None
    """File with the secret that shards at tcp:// know, too; or REKINDLE_SHARD_SECRET in the environment."""

    def __attrs_post_init__(self) -> None:
        """Raise UserError if two options contradict each other."""
        if self.target_devices and self.device != "auto":
            raise UserError(f"--target-devices names all devices, and --device {self.device} one: leave one out")
        if self.layer_weights and not self.target_devices:
            raise UserError("--target-layer-split shares layers among --target-devices, and there are none: name some")
        if self.layer_weights and len(self.layer_weights) != len(self.locations):
            counts = f"{len(self.layer_weights)} weights for {len(self.locations)} devices"
            raise UserError(f"--target-layer-split {self.target_layer_split[:80]}: {counts}; accepted: one for each")

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
    """What weights and KV are kept and computed in; auto is the checkpoint's own, of GGUF files bfloat16 or float32."""

    kv_dtype: Annotated[Literal["auto", "bf16", "fp8", "int8"], flag(MODEL)] = "auto"
    """What keys and values are kept in; auto: as computed. int8, fp8: half of bfloat16's room, other answers."""

    quantize: Annotated[Literal["none", "int8", "int4"], flag(MODEL)] = "none"
    """int8 or int4: round the matrices of a checkpoint that is not packed, in groups of 128, while it is loaded. For
    trying what a packed one would answer, and what room it would take. The start line tells the error."""

    experts: Annotated[str, flag(MODEL, validator=check_experts)] = "device"
    """Where experts are. device: with their layers. host:N: all in host memory, those that are used most in N GiB of
    the CUDA device, too, the others copied there as they are chosen; host: in half of what is left there."""

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
    """Tokens of prompt and answer together; 0: the model's own limit, or what there is memory for."""

    numerics: Annotated[Literal["exact", "fast"], flag(ENGINE)] = "exact"
    """exact: the same tokens cold, warm, alone and batched, bit for bit. fast: gives that up where it is quicker."""

    slots: Annotated[int, flag(ENGINE, converter=parse_integer, validator=Number(gte=0, lte=64))] = 0
    """Sequences that are on the device at once: requests that run together, and prompts that stay warm. 0: 16 on CUDA
    devices, and elsewhere where they take a quarter of the memory at most, or 8; else four, or as many as there is
    memory for at a good length (`rekindle models` tells)."""

    kv_memory: Annotated[int, flag(ENGINE, converter=parse_integer, validator=Number(gte=0, lte=1 << 30))] = 0
    """MiB for the rows of all sequences, which take pages of 256 rows of it as they grow. 0: --slots times --max-ctx;
    where a CUDA device has not so much, what is free there beside weights and buffers, less a reserve."""

    chunk: Annotated[int, flag(ENGINE, converter=parse_integer, validator=check_chunk)] = 0
    """Rows of a prefill chunk, the largest bucket; 0 is the device's default."""

    threads: Annotated[int, flag(ENGINE, converter=parse_integer, validator=Number(gte=0, lte=1024))] = 0
    """CPU threads for the model; 0 is one per core. Part of the numerics class."""


@frozen(kw_only=True)
class SpeculationOptions:
    """The draft model and how its proposals are verified."""

    draft: Annotated[str, flag(DRAFT)] = "auto"
    """Folder of a DFlash draft that was trained for the model; mtp: the model's own prediction head, if its checkpoint
    has one; none: no draft; auto: what a demo comes with."""

    draft_device: Annotated[Device, flag(DRAFT, validator=check_draft_device)] = ""
    """Where it runs: cpu, cuda or cuda:N; by default where the model's last layers are. ipc+cpu:0, ipc+cuda:N: in a
    process of its own; tcp://HOST:PORT: where `rekindle shard` runs."""

    ddtree: Annotated[bool, flag(DRAFT, negative="")] = False
    """Verify trees of proposals, not chains: more tokens a decode step, more work in each, and the same tokens."""

    ddtree_budget: Annotated[int, flag(DRAFT, converter=parse_integer, validator=Number(gte=1, lte=63))] = 22
    """Proposals of such a tree."""

    draft_residency: Annotated[Residency, flag(DRAFT, converter=parse_residency)] = "auto"
    """Where a draft's and a drafter's weights are while no request needs them. persistent: on the device.
    request-scoped: a draft's are parked in host memory, or given back on the CPU; a drafter's are released.
    auto: on the device, unless its memory is short."""

    lazy_draft: Annotated[bool, flag(DRAFT, negative="")] = False
    """Short for --draft-residency request-scoped."""

    def __attrs_post_init__(self) -> None:
        """Raise UserError if two options contradict each other."""
        if self.lazy_draft and self.draft_residency == "persistent":
            raise UserError("--lazy-draft is --draft-residency request-scoped, not persistent: leave one out")

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
    """The compression of prompts (PFlash): when, with which model, and how much is kept."""

    prefill_compression: Annotated[Literal["off", "auto", "always"], flag(COMPRESSION)] = "off"
    """Leave out of prompts what a drafter attends least to; auto: of long ones, where that is quicker."""

    prefill_drafter: Annotated[str, flag(COMPRESSION)] = "auto"
    """Folder or GGUF file of the drafter: any family that is served, with the model's tokenizer; or a demo's name;
    auto: what a demo comes with, unless --prefill-compression is off."""

    prefill_drafter_device: Annotated[Device, flag(COMPRESSION, validator=check_draft_device)] = ""
    """Where it runs: cpu, cuda or cuda:N; the model's own device by default. ipc+cpu:0, ipc+cuda:N: in a process of its
    own; tcp://HOST:PORT: where `rekindle shard` runs, of the drafter."""

    prefill_threshold: Annotated[
        int, flag(COMPRESSION, converter=parse_integer, validator=Number(gte=0, lte=1 << 21))
    ] = 32_000
    """Tokens of a prompt, beyond what is cached of it, from which auto compresses."""

    prefill_keep_ratio: Annotated[float, flag(COMPRESSION, validator=Number(gte=0.001, lte=1))] = 0.05
    """How much of a prompt is kept."""

    prefill_curve: Annotated[str, flag(COMPRESSION, validator=check_curve)] = ""
    """In the place of a single ratio, ratios by tokens of the prompt, such as 10000:0.5,40000:0.2,100000:0.1."""

    @property
    def remote_location(self) -> DeviceLocation | None:
        """The location of the prompt scorer if it runs in another process, else None."""
        return read_remote_location(self.prefill_drafter_device)

    @property
    def keep_ratio_curve(self) -> tuple[tuple[int, int], ...]:
        """Pairs of a prompt length in tokens and a keep ratio in thousandths, ascending by length."""
        return read_curve(self.prefill_curve) if self.prefill_curve else ()
