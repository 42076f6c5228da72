"""A transition table whose rows are ordinary typed functions: the return annotation says where a row leads.

A transition function takes `(state, event, context)` and returns `Transition[NextState, Effect, ...]`, or a union of
such types. The context is what decisions rest on that does not belong to the request. Nothing is declared twice:

* type checkers hold a function to its annotation;
* `step` asserts the annotation on every transition, in production as well;
* the table, the diagram and the test of completeness read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import (
    Any,
    Generic,
    TypeAlias,
    TypeVar,
    TypeVarTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from attrs import define, frozen

S = TypeVar("S")  # a state
E = TypeVar("E")  # an event
C = TypeVar("C")  # the context
T = TypeVar("T")  # the next state
First = TypeVar("First")  # an effect
Second = TypeVar("Second")  # an effect
Effects = TypeVarTuple("Effects")


@define(init=False)
class Transition(Generic[T, *Effects]):
    """The next state, and the effects to carry out on the way there, in order."""

    state: T
    effects: tuple[*Effects]

    def __init__(self, state: T, *effects: *Effects) -> None:
        self.state = state
        self.effects = effects


AnyTransition: TypeAlias = Transition[Any, *tuple[Any, ...]]


@overload
def prepend_effect(effect: First, transition: Transition[T]) -> Transition[T, First]: ...
@overload
def prepend_effect(
    effect: First, transition: Transition[T, Second, *Effects]
) -> Transition[T, First, Second, *Effects]: ...
def prepend_effect(effect: Any, transition: AnyTransition) -> AnyTransition:
    """Return the transition with one more effect before its others.

    There are two signatures because type checkers go through the members of a union one by one only for functions that
    have several.
    """
    return Transition(transition.state, effect, *transition.effects)


@frozen
class Row:
    """One row of the table."""

    state: type
    event: type
    transition: Callable[[Any, Any, Any], AnyTransition]
    arms: tuple[tuple[Any, ...], ...]  # the alternatives of its annotation: each the next state, then the effects


Table: TypeAlias = Mapping[tuple[type, type], Row]


def read_arms(annotation: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the type arguments of every `Transition` in an annotation, which may be a union of unions."""
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from read_arms(member)
    else:
        yield get_args(annotation)


def on(state: type[S], event: type[E], transition: Callable[[S, E, C], AnyTransition]) -> Row:
    """Return the row that makes `transition` in this state for this event. Its annotation gives the arms."""
    arms = dict.fromkeys(read_arms(get_type_hints(transition)["return"]))
    return Row(state, event, transition, tuple(arms))


def ignore(state: type, event: type) -> Row:
    """Return the row that stays in the state and does nothing."""
    return Row(state, event, lambda same, _, __: Transition(same), ((state,),))


def build_table(*rows: Row) -> Table:
    """Return the rows as a table, keyed by state and event. A pair may appear once only."""
    keyed = {(row.state, row.event): row for row in rows}
    assert len(keyed) == len(rows), "a (state, event) pair appears twice"
    return keyed


class IllegalEvent(Exception):
    """A bug: an event reached a state that can never see it."""


def step(rows: Table, state: object, event: object, context: object) -> AnyTransition:
    """Make the transition for an event. Raises IllegalEvent if the table has no row for it."""
    row = rows.get((type(state), type(event)))
    if row is None:
        raise IllegalEvent(f"{type(state).__name__} cannot see {type(event).__name__}")
    transition = row.transition(state, event, context)
    assert (type(transition.state), *map(type, transition.effects)) in row.arms, transition
    return transition
