"""A trace of a router: every event that it was given and every decision, as JSON Lines.

`replay_trace` gives the same events to a new router and compares each decision. So a decision can be explained later,
and another policy can be tried on the same requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeAlias

import cattrs
from attrs import define, frozen
from cattrs.preconf.json import make_converter
from cattrs.strategies import configure_tagged_union

from engine.core.timed_steps import register_timed_steps
from states.routing.choose_replica import Policy, RouteDecision
from states.routing.prefix_router import PrefixRouter, RequestArrived, RouterEvent


@frozen
class RoutingHeader:
    """The first line: the policy of the router."""

    policy: Policy


@frozen
class DecisionMade:
    """The decision about the request of the line before. None: there was no replica."""

    decision: RouteDecision | None


RoutingRecord: TypeAlias = RoutingHeader | DecisionMade | RouterEvent


class RoutingDiffers(Exception):
    """A replay has decided otherwise; the message names the line."""


@cache
def get_converter() -> cattrs.Converter:
    """Return the converter of records. Keys become text: their bytes as hexadecimal digits."""
    built = make_converter(forbid_extra_keys=True)
    built.register_unstructure_hook(bytes, bytes.hex)
    built.register_structure_hook(bytes, lambda value, _: bytes.fromhex(value))
    built.register_unstructure_hook(range, list)
    register_timed_steps(built)
    configure_tagged_union(RoutingRecord, built, tag_name="is")
    return built


def encode_record(record: RoutingRecord) -> str:
    """Return the line of a record."""
    return json.dumps(get_converter().unstructure(record, unstructure_as=RoutingRecord), separators=(",", ":")) + "\n"


@define(eq=False)
class TracedRouter:
    """A router that writes what it is given and what it decides. file: open for text; it is flushed by its owner."""

    router: PrefixRouter
    file: IO[str]

    def __attrs_post_init__(self) -> None:
        self.file.write(encode_record(RoutingHeader(self.router.policy)))

    def advance(self, event: RouterEvent) -> RouteDecision | None:
        decision = self.router.advance(event)
        self.file.write(encode_record(event))
        if isinstance(event, RequestArrived):
            self.file.write(encode_record(DecisionMade(decision)))
        return decision


def parse_record(line: str) -> RoutingRecord:
    """Return the record of a line. Raises TypeError, ValueError, KeyError or BaseValidationError where it is none."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise TypeError("no JSON object")
    kind: Any = RoutingRecord
    found: RoutingRecord = get_converter().structure(record, kind)
    return found


def read_records(path: Path) -> Iterator[RoutingRecord]:
    """Yield the records of a trace. Raises ValueError where a line is none."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield parse_record(line)
            except (ValueError, TypeError, KeyError, cattrs.BaseValidationError) as error:
                raise ValueError(f"{path}: line {number} is no record of a router: {str(error)[:120]}") from error


def replay_trace(path: Path) -> int:
    """Decide everything again, and return the number of decisions. Raises RoutingDiffers or ValueError."""
    router = PrefixRouter()
    decision: RouteDecision | None = None
    count = 0
    for number, record in enumerate(read_records(path), 1):
        match record:
            case RoutingHeader(policy):
                router = PrefixRouter(policy)
            case DecisionMade(recorded):
                count += 1
                if recorded != decision:
                    raise RoutingDiffers(f"{path}: line {number}: recorded {recorded}, now {decision}")
            case event:
                decision = router.advance(event)
    return count
