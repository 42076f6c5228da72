"""The options of `rekindle fleet` besides those of `rekindle serve`, and how both reach the processes of a fleet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, TypedDict

from attrs import frozen
from cyclopts.validators import Number

from engine.settings.config_file import list_words
from engine.settings.option_types import FLEET, flag
from engine.settings.options import Options, evolve_options, flat_values
from engine.settings.user_error import UserError

MOST_REPLICAS = 512
DELAY_S = 86_400
MOST_TOKENS = 1 << 22
RANGE = re.compile(r"(\d{1,4})(?:\.\.(\d{1,4}))?")


@frozen
class ReplicaRange:
    """The least and the most replicas of a fleet. They are equal unless their number follows the load."""

    least: int
    most: int

    @property
    def is_fixed(self) -> bool:
        return self.least == self.most

    def __str__(self) -> str:
        return str(self.least) if self.is_fixed else f"{self.least}..{self.most}"

    @staticmethod
    def parse(text: str) -> ReplicaRange:
        """Return the range of `4` or `1..4`. Raises ValueError."""
        found = RANGE.fullmatch(text)
        least, most = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
        if not 1 <= least <= most <= MOST_REPLICAS:
            raise ValueError(f"replicas: {text[:40]!r}; accepted: 1 to {MOST_REPLICAS}, or a range such as 1..4")
        return ReplicaRange(least, most)


def check_replicas(_: Any, text: str) -> None:
    """Raise ValueError if a text is no number of replicas and no range."""
    ReplicaRange.parse(text)


@frozen(kw_only=True)
class FleetOptions:
    """The options of a fleet: how many replicas, and on which cluster."""

    replicas: Annotated[str, flag(FLEET, validator=check_replicas)] = "2"
    """Number of replicas, such as 2, or a range such as 1..4, in which their number follows the load. Each is a server
    with all slots and caches that the other options name."""

    upscale_delay: Annotated[float, flag(FLEET, validator=Number(gte=0, lte=DELAY_S))] = 30
    """Seconds for which more than three quarters of all slots must be used before a replica is added."""

    downscale_delay: Annotated[float, flag(FLEET, validator=Number(gte=0, lte=DELAY_S))] = 600
    """Seconds for which fewer replicas must be enough before one is taken away. It finishes its requests first."""

    prefill_elsewhere: Annotated[int, flag(FLEET, validator=Number(gte=0, lte=MOST_TOKENS))] = 0
    """Prompts that lack at least so many tokens where they are answered may be read by an idle replica first, which
    leaves their rows in the shared tier (--kv-shared-tier). 0: none are."""

    address: Annotated[str, flag(FLEET)] = ""
    """Address of a running Ray cluster, such as ray-head:6379, or auto for the one on this machine. The fleet is
    deployed there, and the command ends. By default a Ray of its own is started on this machine."""

    yaml: Annotated[bool, flag(FLEET, negative="", show_default=False)] = False
    """Print the file for `serve deploy` instead."""


def collect_changed_values(options: Options) -> dict[str, Any]:
    """Return the options that differ from the defaults, by flat name, as YAML has values."""
    defaults = flat_values(Options())
    changed = {name: value for name, value in flat_values(options).items() if value != defaults[name]}
    return {name: to_plain(value) for name, value in changed.items()}


def to_plain(value: Any) -> Any:
    """Return the value of an option as JSON and YAML have it."""
    return [*value] if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def build_replica_words(options: Options, host: str, folder: Path | None, replica: str) -> list[str]:
    """Return the words with which a replica's server is started.

    It listens on a free port of `host`, and answers to the names of the fleet. folder: that the replica has claimed.
    replica: its id, which the name of its trace carries.
    """
    names = (*options.http.allow_host, options.http.host)
    changed = evolve_options(options, host=host, port=0, allow_host=names)
    if folder is not None:
        changed = evolve_options(changed, kv_cache_dir=folder / "kv")
    if (trace := options.diagnostics.trace) is not None:
        changed = evolve_options(changed, trace=trace.with_name(f"{trace.stem}-{replica}{trace.suffix}"))
    values = collect_changed_values(changed)
    model = values.pop("model", "demo")
    return ["serve", model, *list_words({**values, "port": 0, "host": host})]


def read_gpus(options: Options, *, has_gpu: bool) -> int:
    """Return the GPUs that each replica needs. has_gpu: this machine has one, for options that leave the choice."""
    devices = [location.device for location in options.placement.locations]
    named = {device for device in devices if device.startswith("cuda")}
    return len(named) or int(has_gpu and "auto" in devices)


class FleetArguments(TypedDict, total=False):
    """The arguments of the application, as a file for `serve deploy` has them.

    replicas: a number, or a range as `ReplicaRange.parse` takes it. upscale_delay_s, downscale_delay_s: of a range.
    prefill_elsewhere: `Policy.remote_prefill_min_tokens`. options: those of `rekindle serve`, by flat name. is_local:
    everything runs on one machine.
    """

    replicas: int | str
    upscale_delay_s: float
    downscale_delay_s: float
    prefill_elsewhere: int
    options: dict[str, Any]
    is_local: bool


def list_arguments(options: Options, fleet: FleetOptions) -> FleetArguments:
    """Return the arguments of the application. Raises UserError."""
    if fleet.prefill_elsewhere and not options.shared_tier.kv_shared_tier:
        raise UserError("--prefill-elsewhere needs a store that all replicas share: add --kv-shared-tier")
    replicas = ReplicaRange.parse(fleet.replicas)
    arguments: FleetArguments = {"replicas": replicas.least if replicas.is_fixed else str(replicas)}
    if not replicas.is_fixed:
        arguments["upscale_delay_s"] = fleet.upscale_delay
        arguments["downscale_delay_s"] = fleet.downscale_delay
    if fleet.prefill_elsewhere:
        arguments["prefill_elsewhere"] = fleet.prefill_elsewhere
    return {**arguments, "options": collect_changed_values(options)}
