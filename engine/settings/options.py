"""All options of `rekindle serve` in one object: from flags, then the environment, then a TOML file, then defaults.

`model_options.py` and `server_options.py` hold the options themselves, in eleven groups. Here they are put together,
and contradictions between options of different groups are refused. Tests, benchmarks and other commands build the
object with `build_options` from flat names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import attrs
from attrs import field, frozen

from adapters import demo
from engine.settings.model_options import (
    CompressionOptions,
    ModelOptions,
    PlacementOptions,
    RuntimeOptions,
    SpeculationOptions,
    WeightOptions,
)
from engine.settings.option_types import FLAT
from engine.settings.placement import find_misplacement
from engine.settings.server_options import (
    CacheOptions,
    CheckpointOptions,
    DiagnosticOptions,
    HttpOptions,
    SharedTierOptions,
)
from engine.settings.user_error import UserError

FILE_NAMES = ("model", "draft", "prefill_drafter", "api_key_file", "kv_cache_dir", "trace", "shard_secret_file")
"""Options whose folders are not shown: they tell about this machine."""
Grouped = TypeVar("Grouped", bound=attrs.AttrsInstance)
"""Options in groups, each of which is a class of attrs."""


@frozen
class Options:
    """Options of `rekindle serve`. Every one can also come from `REKINDLE_<NAME>` or from the `--config` file."""

    model: Annotated[ModelOptions, FLAT] = field(factory=ModelOptions)
    placement: Annotated[PlacementOptions, FLAT] = field(factory=PlacementOptions)
    weights: Annotated[WeightOptions, FLAT] = field(factory=WeightOptions)
    runtime: Annotated[RuntimeOptions, FLAT] = field(factory=RuntimeOptions)
    speculation: Annotated[SpeculationOptions, FLAT] = field(factory=SpeculationOptions)
    compression: Annotated[CompressionOptions, FLAT] = field(factory=CompressionOptions)
    http: Annotated[HttpOptions, FLAT] = field(factory=HttpOptions)
    cache: Annotated[CacheOptions, FLAT] = field(factory=CacheOptions)
    shared_tier: Annotated[SharedTierOptions, FLAT] = field(factory=SharedTierOptions)
    checkpoints: Annotated[CheckpointOptions, FLAT] = field(factory=CheckpointOptions)
    diagnostics: Annotated[DiagnosticOptions, FLAT] = field(factory=DiagnosticOptions)

    def __attrs_post_init__(self) -> None:
        """Raise UserError if options of different groups contradict each other."""
        self._check_processes()
        compression = self.compression
        if not self.scorer_name and (compression.prefill_compression != "off" or compression.prefill_drafter_device):
            asked = f"--prefill-compression {compression.prefill_compression}, --prefill-drafter-device"
            raise UserError(f"{asked}: there is no drafter that could score prompts; name one with --prefill-drafter")
        self._check_freezing()

    def _check_processes(self) -> None:
        remote = (self.speculation.remote_location, self.compression.remote_location)
        locations = (*self.placement.locations, *(location for location in remote if location is not None))
        has_interpreter = bool(self.placement.target_shard_ipc_python)
        has_secret = bool(self.placement.shard_secret_file)
        if why := find_misplacement(locations, interpreter=has_interpreter, secret=has_secret):
            raise UserError(why)

    def _check_freezing(self) -> None:
        if not self.cache.disk_prefix_cache_compress:
            return
        if self.compression.prefill_compression == "off":
            how = "shortens messages where --prefill-compression says so, and it is off"
            raise UserError(f"--disk-prefix-cache-compress {how}; accepted there: auto, always")
        if not (self.cache.kv_cache_budget and self.cache.uses_disk):
            where = "keeps shortened messages in the folder of the prefix cache, and --disk-prefix-cache off or"
            raise UserError(f"--disk-prefix-cache-compress {where} --kv-cache-budget 0 declines that: leave one out")

    @property
    def scorer_name(self) -> str:
        """The folder, file or demo name of the model that scores prompts. Empty if no model does."""
        if self.compression.prefill_drafter != "auto":
            return self.compression.prefill_drafter
        is_demo = self.model.model in demo.FOLDERS
        return str(demo.DRAFTER) if is_demo and self.compression.prefill_compression != "off" else ""

    def redacted_values(self) -> dict[str, Any]:
        """Return every option by its flat name for the trace's header and /props, without secrets and folders."""
        values = flat_values(self)
        values["api_key"] = len(self.http.api_key)
        values["target_shard_ipc_python"] = None  # an interpreter of this machine
        for name in FILE_NAMES:
            values[name] = None if values[name] is None else Path(values[name]).name
        return values


def flat_values(options: Options) -> dict[str, Any]:
    """Return the value of every option by its flat name, in the order of `--help`."""
    groups = attrs.asdict(options, recurse=False).values()
    return {name: value for group in groups for name, value in attrs.asdict(group, recurse=False).items()}


def build_options(**values: Any) -> Options:
    """Build options from values by flat name, as `build_options(model="demo", slots=4)`. Raises as `evolve_options`."""
    return evolve_options(Options(), **values)


def evolve_options(options: Grouped, **values: Any) -> Grouped:
    """Return a copy of options in groups with other values, by flat name.

    The values are not validated as flags are; `config_file.parse_values` does that. Raises TypeError for a name that no
    option has, and UserError for options that contradict each other.
    """
    groups: dict[str, Any] = {}
    for name, group in attrs.asdict(options, recurse=False).items():
        own_names = {option.name for option in attrs.fields(type(group))} & values.keys()
        groups[name] = attrs.evolve(group, **{own_name: values.pop(own_name) for own_name in own_names})
    if values:
        raise TypeError(f"no such options: {', '.join(sorted(values))}")
    return type(options)(**groups)
