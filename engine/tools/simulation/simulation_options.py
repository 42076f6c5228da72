"""The options of `rekindle simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from attrs import frozen
from cyclopts import Group, Parameter
from cyclopts.validators import Number

from effects.scope import ACCEPTED_FORMS, Scope, parse_scope

POLICY = Group("What is tried", sort_key=1)
SERVER = Group("On what", sort_key=2)
OUTPUT = Group("Output", sort_key=3)


def check_scopes(_: Any, value: str) -> None:
    for word in value.split(","):
        try:
            parse_scope(word.strip())
        except ValueError:
            raise ValueError(f"Must be {ACCEPTED_FORMS}; several with commas between them.") from None


def natural_number(most: int = 1 << 30, least: int = 0) -> Number:
    return Number(gte=least, lte=most)


@frozen(kw_only=True)
class SimulationOptions:
    """Options of `rekindle simulate`. None: as it was recorded, or else as `rekindle serve` has it."""

    scope: Annotated[str, Parameter(group=POLICY, validator=check_scopes)] = "off,full,auto"
    """Policies to compare, with commas between them: off, full, auto, auto:N, N."""

    budget: Annotated[int, Parameter(group=POLICY, validator=natural_number())] = 8192
    """MiB on disk, as --kv-cache-budget of `rekindle serve`."""

    budget_tokens: Annotated[int | None, Parameter(group=POLICY, validator=natural_number(1 << 40))] = None
    """The same as a number of tokens whose KV rows find room; takes the place of --budget."""

    host_budget: Annotated[int, Parameter(group=POLICY, validator=natural_number())] = 512
    """MiB of host memory, as --host-cache-budget of `rekindle serve`."""

    min_tokens: Annotated[int | None, Parameter(group=POLICY, validator=natural_number(1 << 21))] = None
    """Less than this many tokens are not kept; as recorded, or 512."""

    prefill_compression: Annotated[Literal["off", "auto", "always"], Parameter(group=POLICY)] = "off"
    """Shorten prompts, as --prefill-compression of `rekindle serve`; how long a drafter takes is in --costs."""

    prefill_threshold: Annotated[int, Parameter(group=POLICY, validator=natural_number(1 << 21))] = 32_000
    """Tokens from which auto does, as --prefill-threshold."""

    prefill_keep_ratio: Annotated[float, Parameter(group=POLICY, validator=Number(gte=0.001, lte=1))] = 0.05
    """How much is kept, as --prefill-keep-ratio."""

    freeze: Annotated[bool, Parameter(group=POLICY, negative="", show_default=False)] = False
    """Freeze messages that have aged, as --disk-prefix-cache-compress."""

    restart_every: Annotated[int, Parameter(group=SERVER, validator=natural_number())] = 0
    """Restart after so many requests: slots and host memory are lost, the disk stays. 0: never."""

    interleave: Annotated[int, Parameter(group=SERVER, validator=natural_number())] = 0
    """Serve so many sessions at a time, in rounds whose clocks start together. 0: all at once."""

    slots: Annotated[int | None, Parameter(group=SERVER, validator=natural_number(64, 1))] = None
    """Sequences on the device; as recorded, or 4."""

    state_bytes: Annotated[int | None, Parameter(group=SERVER, validator=natural_number(1 << 40))] = None
    """Bytes of a checkpoint, of a model with recurrent state; as recorded or in --costs, or 0: it has none."""

    state_checkpoints: Annotated[int | None, Parameter(group=SERVER, validator=natural_number(1024))] = None
    """States that such a model keeps on the device beside the slots' own; as recorded, or 8."""

    costs: Annotated[Path | None, Parameter(group=SERVER)] = None
    """JSON file of how long things take (docs/SIMULATE.md); else as recorded, or as measured with the demo."""

    shared_head: Annotated[bool, Parameter(group=SERVER, negative="", show_default=False)] = False
    """Logs of token counts: sessions with equally many tool tokens begin with the same tools and system prompt."""

    model: Annotated[Path | None, Parameter(group=SERVER)] = None
    """Checkpoint whose tokenizer reads logs of texts; else the demo's."""

    json: Annotated[bool, Parameter(group=OUTPUT, negative="", show_default=False)] = False
    """Print JSON, and nothing else, on standard output."""

    plot: Annotated[Path | None, Parameter(group=OUTPUT)] = None
    """Draw what came of it to a file, .svg or .png."""

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """Each once."""
        return tuple(dict.fromkeys(parse_scope(word.strip()) for word in self.scope.split(",")))
