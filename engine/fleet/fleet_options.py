"""The options of `rekindle fleet` besides those of `rekindle serve`, and how both reach the processes of a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from attrs import frozen
from cyclopts.validators import Number

from engine.settings.config_file import list_words
from engine.settings.option_types import FLEET, flag, parse_integer
from engine.settings.options import Options, evolve_options, flat_values
from engine.settings.user_error import UserError

MOST_REPLICAS = 512


@frozen(kw_only=True)
class FleetOptions:
    """The options of a fleet: how many replicas, and on which cluster."""

    replicas: Annotated[int, flag(FLEET, converter=parse_integer, validator=Number(gte=1, lte=MOST_REPLICAS))] = 2
    """Number of replicas. Each is a server with all slots and caches that the other options name."""

    address: Annotated[str, flag(FLEET)] = ""
    """Address of a running Ray cluster, such as ray-head:6379, or auto for the one on this machine. The fleet is
    deployed there, and the command ends. By default a Ray of its own is started on this machine."""

    yaml: Annotated[bool, flag(FLEET, negative="", show_default=False)] = False
    """Print the file for `serve deploy` instead."""


def collect_changed_values(options: Options) -> dict[str, Any]:
    """Return the options that differ from the defaults, by flat name, as YAML has values. Raises UserError for options
    that name one server.
    """
    if options.diagnostics.trace is not None:
        raise UserError("--trace records one server, and a fleet has several: leave it out")
    defaults = flat_values(Options())
    changed = {name: value for name, value in flat_values(options).items() if value != defaults[name]}
    return {name: to_plain(value) for name, value in changed.items()}


def to_plain(value: Any) -> Any:
    """Return the value of an option as JSON and YAML have it."""
    return [*value] if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def build_replica_words(options: Options, host: str, folder: Path | None) -> list[str]:
    """Return the words with which a replica's server is started.

    It listens on a free port of `host`, and answers to the names of the fleet. folder: that the replica has claimed.
    """
    names = (*options.http.allow_host, options.http.host)
    changed = evolve_options(options, host=host, port=0, allow_host=names)
    if folder is not None:
        changed = evolve_options(changed, kv_cache_dir=folder / "kv")
    values = collect_changed_values(changed)
    model = values.pop("model", "demo")
    return ["serve", model, *list_words({**values, "port": 0, "host": host})]


def read_gpus(options: Options, *, has_gpu: bool) -> int:
    """Return the GPUs that each replica needs. has_gpu: this machine has one, for options that leave the choice."""
    places = [location.device for location in options.placement.locations]
    named = {place for place in places if place.startswith("cuda")}
    return len(named) or int(has_gpu and "auto" in places)


def list_arguments(options: Options, replicas: int) -> Mapping[str, Any]:
    """Return the arguments of the application, as a file for `serve deploy` has them."""
    return {"replicas": replicas, "options": collect_changed_values(options)}
