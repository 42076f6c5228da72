"""The language between the core and the world: complete, plain, and spoken in the right mood."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_args

import attrs
import pytest

import effects
from effects.all import Effect, EffectRequest, Launch, Outcome
from effects.decode import RunDecode
from effects.ids import DeviceFailed, RequestId, Side, SlotId, StoreFailed
from effects.lookup import FindPrefix
from effects.residency import LoadModel

EFFECTS, OUTCOMES = get_args(Effect), get_args(Outcome)
NOT_SPOKEN = {
    "ModelDetails",
    "EffectRequest",
    "Launch",
    "Job",
    "Sampling",
    "Grammar",
    "Report",
    "Closed",
    "Status",
    "RequestStatus",
    "PastRequest",
    "Totals",
    "Activity",
    "LaunchFailed",
    "SlotStatus",
    "Divergence",
    "Scope",
    "Selection",
    "Compression",
    "Compressed",
    "PromptPart",
    "Copying",
}  # neither asked nor answered


def classes() -> Iterator[type]:
    for module in pkgutil.iter_modules(effects.__path__):
        for each in vars(import_module(f"effects.{module.name}")).values():
            if isinstance(each, type) and attrs.has(each) and each.__module__ == f"effects.{module.name}":
                yield each


def names(some: tuple[type, ...]) -> list[str]:
    return [each.__name__ for each in some]


def test_every_word_is_in_one_of_the_unions() -> None:
    assert {each.__name__ for each in classes()} - NOT_SPOKEN == {*names(EFFECTS), *names(OUTCOMES)}


@pytest.mark.parametrize("effect", EFFECTS, ids=names(EFFECTS))
def test_an_effect_that_is_awaited_names_its_lane_and_its_outcomes(effect: Any) -> None:
    assert set(effect.outcomes) <= set(OUTCOMES)
    if effect.outcomes:
        failure = {Side.DEVICE: DeviceFailed, Side.STORE: StoreFailed}[effect.side]
        assert effect.outcomes[-1] is failure
        assert len(effect.outcomes) >= 2, "an effect that can only fail"


@pytest.mark.parametrize("outcome", OUTCOMES, ids=names(OUTCOMES))
def test_an_outcome_answers_something(outcome: type) -> None:
    assert [effect for effect in EFFECTS if outcome in effect.outcomes]


@pytest.mark.parametrize("word", [*EFFECTS, *OUTCOMES], ids=[*names(EFFECTS), *names(OUTCOMES)])
def test_words_are_values_without_a_life_of_their_own(word: Any) -> None:
    assert attrs.has(word)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        object.__new__(word).anything = 1
    assert word.__hash__ is not object.__hash__
    public = {method for method in vars(word) if not method.startswith("_")} - {"outcomes", "side"}
    assert public <= {field.name for field in attrs.fields(word)}, "data, and nothing it does"


@pytest.mark.parametrize("word", [*EFFECTS, *OUTCOMES], ids=[*names(EFFECTS), *names(OUTCOMES)])
def test_effects_are_imperative_and_outcomes_past_tense(word: type) -> None:
    happened = word.__name__.endswith(("ed", "Done", "Found"))
    assert happened == (word in OUTCOMES)


def test_two_asks_that_say_the_same_are_the_same() -> None:
    one = Launch((EffectRequest(RequestId(1), RunDecode(SlotId(0), 4, 7)),))
    assert one == Launch((EffectRequest(RequestId(1), RunDecode(SlotId(0), 4, 7, propose=0)),))
    assert hash(one) == hash(Launch((EffectRequest(RequestId(1), RunDecode(SlotId(0), 4, 7)),)))
    assert one != Launch((EffectRequest(RequestId(2), RunDecode(SlotId(0), 4, 7)),))
    assert LoadModel("draft") == LoadModel("draft")
    assert FindPrefix((1, 2), 0) != FindPrefix((1, 2), 0, prompts_to_compare=1)
