"""The device lane: who waits for it, who is on it, what is launched next and with whom it is batched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from attrs import evolve, frozen

from effects.all import Ask, Launch, Outcome
from effects.ids import RequestId
from effects.round import RunRound
from states import pace, residency
from states.life import State
from states.residency import Residency
from states.settings import Settings
from states.slots import hold_of


@frozen
class Answer:
    """An outcome that the core knows without asking anyone."""

    request: RequestId
    outcome: Outcome


@frozen
class Lane:
    waiting: tuple[Ask, ...] = ()  # in order of arrival
    running: tuple[Ask, ...] = ()  # members of the launch that have not answered
    rounds_last: bool = False  # the last launch was a batch of rounds
    members: int = 0  # of the last launch


Chosen: TypeAlias = Launch | Answer | None


def join(lane: Lane, ask: Ask) -> Lane:
    return evolve(lane, waiting=(*lane.waiting, ask))


def leave(lane: Lane, request: RequestId) -> tuple[Lane, bool]:
    """Give up a place in the queue; False if there was none to give up."""
    stays = tuple(ask for ask in lane.waiting if ask.request != request)
    return evolve(lane, waiting=stays), len(stays) < len(lane.waiting)


def answered(lane: Lane, request: RequestId) -> Lane:
    """One member of the launch is back. The lane is free once all are, so a batch stays together."""
    return evolve(lane, running=tuple(ask for ask in lane.running if ask.request != request))


def choose(
    lane: Lane, models: Residency, settings: Settings, requests: Mapping[RequestId, State]
) -> tuple[Lane, Residency, Chosen]:
    """What to do next, decided when the lane is free and not before.

    What needs no work is answered first. Rounds and everything else take turns, so a long prefill delays a decoding
    neighbour by one chunk at most, and the other way round. All rounds that wait go as one batch, in order of arrival,
    up to `batch_rows`, each with as many proposals as pay in that company.
    """
    if lane.running or not lane.waiting:
        return lane, models, None
    for ask in lane.waiting:
        models, outcome = residency.at_once(models, ask, settings.residency)
        if outcome is not None:
            return drop(lane, ask), models, Answer(ask.request, outcome)
    rounds = [ask for ask in lane.waiting if isinstance(ask.effect, RunRound)]
    others = [ask for ask in lane.waiting if not isinstance(ask.effect, RunRound)]
    if rounds and not (others and lane.rounds_last):
        batch = fitting(shared(rounds, requests, settings.batch_rows), settings.batch_rows)
        return start(lane, batch, rounds=True), models, Launch(batch)
    return start(lane, (others[0],), rounds=False), models, Launch((others[0],))


def shared(rounds: list[Ask], requests: Mapping[RequestId, State], limit: int) -> list[Ask]:
    """The same rounds, narrowed where they go together."""
    if len(rounds) == 1:
        return rounds
    effects = [ask.effect for ask in rounds if isinstance(ask.effect, RunRound)]
    holds = [hold_of(requests.get(ask.request)) for ask in rounds]
    wanted = [(one.propose, hold.pace if hold else None) for one, hold in zip(effects, holds, strict=True)]
    return [
        ask if propose == one.propose else evolve(ask, effect=evolve(one, propose=propose))
        for ask, one, propose in zip(rounds, effects, pace.share(wanted, limit), strict=True)
    ]


def fitting(rounds: list[Ask], limit: int) -> tuple[Ask, ...]:
    """The longest run of rounds, from the front, whose rows fit; at least one."""
    taken, rows = list[Ask](), 0
    for ask in rounds:
        assert isinstance(ask.effect, RunRound)
        rows += 1 + ask.effect.propose
        if taken and rows > limit:
            break
        taken.append(ask)
    return tuple(taken)


def start(lane: Lane, asks: tuple[Ask, ...], *, rounds: bool) -> Lane:
    leaving = {ask.request for ask in asks}  # a request waits with one ask at most
    return Lane(tuple(ask for ask in lane.waiting if ask.request not in leaving), asks, rounds, len(asks))


def drop(lane: Lane, ask: Ask) -> Lane:
    return evolve(lane, waiting=tuple(other for other in lane.waiting if other is not ask))
