"""The command `rekindle fleet`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from engine.fleet.fleet_options import FleetOptions
from engine.fleet.ray_environment import prepare_environment
from engine.settings.option_types import SERVER
from engine.settings.options import Options
from engine.settings.output import log_format
from engine.settings.user_error import UserError


def fleet(
    options: Annotated[Options, Parameter(name="*")] = Options(),  # noqa: B008 - a frozen value
    *,
    fleet_options: Annotated[FleetOptions, Parameter(name="*")] = FleetOptions(),  # noqa: B008 - a frozen value
    config: Annotated[Path | None, Parameter(group=SERVER)] = None,
) -> int:
    """Serve a model by several replicas, as a Ray Serve application. Needs `pip install 'rekindle[fleet]'`.

    All options of `rekindle serve` apply to each replica. --host and --port are those of Ray Serve's proxy.

    `rekindle fleet --replicas 2`

    `rekindle fleet ~/models/Qwen3-4B --device cuda --replicas 8 --address auto`

    `rekindle fleet ~/models/Qwen3-4B --replicas 8 --yaml > fleet.yaml`

    Parameters
    ----------
    config
        TOML file with the same option names, such as `port = 8080`.
    """
    del config  # read before the command line was
    from engine.fleet.serve_file import write_serve_file  # noqa: PLC0415 - what a fleet needs would keep `--help` waiting
    from engine.settings.preflight import check_address, prepare_options  # noqa: PLC0415

    log_format.configure(options.diagnostics.log_format, options.diagnostics.log_level)
    if fleet_options.yaml:
        print(write_serve_file(options, fleet_options), end="")
        return 0
    if importlib.util.find_spec("ray") is None:
        raise UserError("a fleet needs Ray Serve: pip install 'rekindle[fleet]'")
    prepare_environment(fleet_options.address)
    from engine.fleet.deploy_fleet import deploy_to_cluster, run_local_fleet  # noqa: PLC0415

    if fleet_options.address:
        return deploy_to_cluster(options, fleet_options)
    prepare_options(options)
    check_address(options.http)
    return run_local_fleet(options, fleet_options)
