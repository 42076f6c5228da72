"""Writes the file for `serve deploy`: the application with its options, and where Ray Serve's proxies listen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from engine.fleet.fleet_options import FleetOptions, list_arguments
from engine.settings.options import Options
from engine.settings.server_options import HttpOptions
from engine.settings.user_error import UserError

IMPORT_PATH = "engine.fleet.application:build_fleet"
NAME = "rekindle"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - the proxies of a cluster are reached from other machines


def write_serve_file(options: Options, fleet: FleetOptions) -> str:
    """Return the file as YAML. Raises UserError for keys, which would stand in it, and for --host."""
    if options.http.api_key:
        raise UserError("--api-key would stand in the file that --yaml prints: use --api-key-file, on every machine")
    if options.http.host not in {HttpOptions().host, EVERYWHERE}:
        raise UserError(f"--host {options.http.host} has no effect with --yaml: proxies listen on every address")
    file = {
        "proxy_location": "EveryNode",
        "http_options": {"host": EVERYWHERE, "port": options.http.port},
        "applications": [
            {
                "name": NAME,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": list_arguments(options, fleet),
            }
        ],
    }
    return "".join(f"{line}\n" for line in write_mapping(file, ""))


def write_mapping(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yield the lines of a mapping. Scalars are written as JSON, which is YAML as well."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from write_mapping(value, indent + "  ")
        elif isinstance(value, Sequence) and not isinstance(value, str) and value:
            yield f"{indent}{name}:"
            yield from write_items(value, indent)
        else:
            yield f"{indent}{name}: {msgspec.json.encode(value).decode()}"


def write_items(values: Sequence[Any], indent: str) -> Iterator[str]:
    """Yield the lines of a list."""
    for value in values:
        if isinstance(value, Mapping):
            first, *rest = write_mapping(value, indent + "  ")
            yield f"{indent}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{indent}- {msgspec.json.encode(value).decode()}"
