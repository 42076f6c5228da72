"""The options of `rekindle simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from attrs import field, frozen
from cyclopts import Group, Parameter
from cyclopts.validators import Number

from effects.scope import ACCEPTED_FORMS, Scope, parse_scope
from engine.settings.option_types import FLAT

POLICY = Group("Policies", sort_key=1)
SERVER = Group("Server and logs", sort_key=2)
FLEET = Group("Fleet", sort_key=3)
OUTPUT = Group("Output", sort_key=4)
ROUTER_NAMES = ("round-robin", "least-queue", "power-of-two", "consistent-hash", "ray-prefix", "prefix")


def check_scopes(_: Any, value: str) -> None:
    for word in value.split(","):
        try:
            parse_scope(word.strip())
        except ValueError:
            raise ValueError(f"Must be {ACCEPTED_FORMS}. Separate several with commas.") from None


def check_routers(_: Any, value: str) -> None:
    if unknown := [word for word in value.split(",") if word.strip() not in ROUTER_NAMES]:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(ROUTER_NAMES)}. Separate several with commas.")


def natural_number(most: int = 1 << 30, least: int = 0) -> Number:
    return Number(gte=least, lte=most)


@frozen(kw_only=True)
class SimulatedPolicies:
    """The policies of the cache and of compression that are compared. None: as it was recorded."""

    scope: Annotated[str, Parameter(group=POLICY, validator=check_scopes)] = "off,full,auto"
    """Cache policies to compare, with commas between them: off, full, auto, auto:N, N."""

    budget: Annotated[int, Parameter(group=POLICY, validator=natural_number())] = 8192
    """Size of the cache on disk in MiB, as --kv-cache-budget of `rekindle serve`."""

    budget_tokens: Annotated[int | None, Parameter(group=POLICY, validator=natural_number(1 << 40))] = None
    """Size of the cache on disk in tokens; replaces --budget."""

    host_budget: Annotated[int, Parameter(group=POLICY, validator=natural_number())] = 512
    """Host memory in MiB, as --host-cache-budget of `rekindle serve`."""

    min_tokens: Annotated[int | None, Parameter(group=POLICY, validator=natural_number(1 << 21))] = None
    """Prompts with fewer tokens are not kept. By default the recorded value, or 512."""

    prefill_compression: Annotated[Literal["off", "auto", "always"], Parameter(group=POLICY)] = "off"
    """Shorten prompts, as --prefill-compression of `rekindle serve`. The time of the drafter comes from --costs."""

    prefill_threshold: Annotated[int, Parameter(group=POLICY, validator=natural_number(1 << 21))] = 32_000
    """auto compresses from this many tokens on, as --prefill-threshold."""

    prefill_keep_ratio: Annotated[float, Parameter(group=POLICY, validator=Number(gte=0.001, lte=1))] = 0.05
    """Share of the prompt that is kept, as --prefill-keep-ratio."""

    freeze: Annotated[bool, Parameter(group=POLICY, negative="", show_default=False)] = False
    """Freeze old messages, as --disk-prefix-cache-compress."""

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """Each once."""
        return tuple(dict.fromkeys(parse_scope(word.strip()) for word in self.scope.split(",")))


@frozen(kw_only=True)
class SimulatedServerOptions:
    """The server that is simulated, and how logs are read. None: as it was recorded, or as `rekindle serve` has it."""

    restart_every: Annotated[int, Parameter(group=SERVER, validator=natural_number())] = 0
    """Restart the server after so many requests: slots and host memory are lost, the disk stays. 0: never."""

    interleave: Annotated[int, Parameter(group=SERVER, validator=natural_number())] = 0
    """Serve so many sessions at a time, in rounds whose clocks start together. 0: all at once."""

    slots: Annotated[int | None, Parameter(group=SERVER, validator=natural_number(64, 1))] = None
    """Sequences on the device. By default the recorded value, or 4."""

    state_bytes: Annotated[int | None, Parameter(group=SERVER, validator=natural_number(1 << 40))] = None
    """Bytes of one state of a recurrent model. By default recorded or in --costs, otherwise 0."""

    state_checkpoints: Annotated[int | None, Parameter(group=SERVER, validator=natural_number(1024))] = None
    """Earlier states that such a model keeps on the device. By default the recorded value, or 8."""

    costs: Annotated[Path | None, Parameter(group=SERVER)] = None
    """JSON file with durations (docs/SIMULATE.md). By default the recorded ones, or those measured with the demo."""

    acceptance: Annotated[Path | None, Parameter(group=SERVER)] = None
    """Output of `rekindle bench speculation --json`: how often proposals are right, by position. Decode steps then give
    as many tokens as are drawn from it. Their time is `step_price` of --costs."""

    draft: Annotated[str, Parameter(group=SERVER)] = ""
    """Kind of draft in that output. By default the first one."""

    width: Annotated[int, Parameter(group=SERVER, validator=natural_number(31))] = 0
    """Proposals of a decode step at most. 0: as many as were measured."""

    shared_head: Annotated[bool, Parameter(group=SERVER, negative="", show_default=False)] = False
    """For logs of token counts: sessions with the same number of tool tokens share tools and system prompt."""

    model: Annotated[Path | None, Parameter(group=SERVER)] = None
    """Checkpoint whose tokenizer reads logs with texts. By default the demo."""


@frozen(kw_only=True)
class SimulatedFleetOptions:
    """The fleet that is simulated in the place of one server."""

    replicas: Annotated[int, Parameter(group=FLEET, validator=natural_number(4096))] = 0
    """Simulate a fleet of so many replicas behind a router (docs/ROUTING.md). 0: one server. Scopes and compression do
    not count then: everything is kept."""

    router: Annotated[str, Parameter(group=FLEET, validator=check_routers)] = "least-queue,ray-prefix,prefix"
    """Routers to compare, with commas between them: round-robin, least-queue, power-of-two, consistent-hash,
    ray-prefix, prefix."""

    conversations: Annotated[int, Parameter(group=FLEET, validator=natural_number(1 << 20))] = 0
    """Conversations in all, each a copy of one of the logs. 0: 16 for each replica."""

    arrivals: Annotated[float, Parameter(group=FLEET, validator=Number(gte=0, lte=1e6))] = 600
    """Seconds in which the conversations begin, at random times."""

    shared_budget: Annotated[int, Parameter(group=FLEET, validator=natural_number())] = 0
    """Size of the tier that all replicas share, in MiB. 0: there is none."""

    prefill_elsewhere: Annotated[int, Parameter(group=FLEET, validator=natural_number(1 << 22))] = 0
    """Missing tokens from which an idle replica may read a prompt for another one, by way of the shared tier. 0: none
    does."""

    @property
    def routers(self) -> tuple[str, ...]:
        """Each once."""
        return tuple(dict.fromkeys(word.strip() for word in self.router.split(",")))


@frozen(kw_only=True)
class SimulationOutput:
    """The form of the result."""

    json: Annotated[bool, Parameter(group=OUTPUT, negative="", show_default=False)] = False
    """Print only JSON on standard output."""

    plot: Annotated[Path | None, Parameter(group=OUTPUT)] = None
    """Draw the result to this file, .svg or .png."""


@frozen(kw_only=True)
class SimulationOptions:
    """Options of `rekindle simulate`."""

    policies: Annotated[SimulatedPolicies, FLAT] = field(factory=SimulatedPolicies)
    server: Annotated[SimulatedServerOptions, FLAT] = field(factory=SimulatedServerOptions)
    fleet: Annotated[SimulatedFleetOptions, FLAT] = field(factory=SimulatedFleetOptions)
    output: Annotated[SimulationOutput, FLAT] = field(factory=SimulationOutput)
