"""The decode steps of a simulation: how many tokens each request gets, and how long the steps take."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from engine.tools.simulation.simulated_costs import Costs


@frozen
class DecodingRequest:
    """A request of a launch. number: its own. position: of its last token. left: tokens that it still answers."""

    number: int
    position: int
    left: int


@frozen
class TakenSteps:
    """Decode steps that are one event. tokens: of each request. ns: of all steps together."""

    tokens: tuple[int, ...]
    steps: int
    ns: int


def take_steps(costs: Costs, members: Sequence[DecodingRequest], most: int, room_ns: float) -> TakenSteps:
    """Take decode steps until one more would end after `room_ns`, but at least one.

    The times of the steps are added one by one, so the result equals that of single steps. most: of steps. Where
    proposals are drawn, the last step is also the first one in which a request gets its last token.
    """
    if costs.acceptance is not None:
        return take_drawn_steps(costs, members, most, room_ns)
    took = costs.decode_ns([member.position for member in members])
    steps = 1
    while steps < most:
        more = costs.decode_ns([member.position + steps for member in members])
        if took + more > room_ns:
            break
        took += more
        steps += 1
    return TakenSteps((steps,) * len(members), steps, took)


def take_drawn_steps(costs: Costs, members: Sequence[DecodingRequest], most: int, room_ns: float) -> TakenSteps:
    """Take decode steps whose tokens are drawn from an acceptance profile."""
    assert costs.acceptance is not None
    got = [0] * len(members)
    took = 0
    steps = 0
    while steps < most:
        positions = [member.position + count for member, count in zip(members, got, strict=True)]
        more = round(costs.plain_ns(positions) * costs.step_price)
        if steps and took + more > room_ns:
            break
        for index, member in enumerate(members):
            drawn = costs.acceptance.draw_tokens(member.number, positions[index])
            got[index] += min(drawn, member.left - got[index])
        took += more
        steps += 1
        if any(count >= member.left for member, count in zip(members, got, strict=True)):
            break
    return TakenSteps(tuple(got), steps, took)
