"""A transition table whose rows are ordinary typed functions: the return annotation is the edge.

An arrow is `(state, event, known) -> Transition[NextState, Effect, ...]`, or a union of such; `known` is what decisions rest
on that is no request's own. Type checkers hold arrows to their
annotation, `step` asserts it on every transition in production, and the table, the diagram and the exhaustiveness test
read it. Nothing is declared twice.
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

S = TypeVar("S")
E = TypeVar("E")
K = TypeVar("K")
T = TypeVar("T")
One = TypeVar("One")
Another = TypeVar("Another")
Asks = TypeVarTuple("Asks")


@define(init=False)
class Transition(Generic[T, *Asks]):
    """The next state, and what to ask of the world on the way there, in order."""

    state: T
    effects: tuple[*Asks]

    def __init__(self, state: T, *effects: *Asks) -> None:
        self.state = state
        self.effects = effects


AnyTransition: TypeAlias = Transition[Any, *tuple[Any, ...]]


@overload
def first(effect: One, then: Transition[T]) -> Transition[T, One]: ...
@overload
def first(effect: One, then: Transition[T, Another, *Asks]) -> Transition[T, One, Another, *Asks]: ...
def first(effect: Any, then: AnyTransition) -> AnyTransition:
    """Ask for this, then go on as `then` says. Two signatures, since checkers go through a union's arms, one by one,
    for functions that have several.
    """
    return Transition(then.state, effect, *then.effects)


@frozen
class Row:
    state: type
    event: type
    arrow: Callable[[Any, Any, Any], AnyTransition]
    arms: tuple[tuple[Any, ...], ...]  # each: where it may lead, then what it asks on the way


Table: TypeAlias = Mapping[tuple[type, type], Row]


def arms_of(annotation: Any) -> Iterator[tuple[Any, ...]]:
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from arms_of(member)
    else:
        yield get_args(annotation)


def on(state: type[S], event: type[E], arrow: Callable[[S, E, K], AnyTransition]) -> Row:
    """Tie `arrow` to a (state, event) pair. Its return annotation is read as its arms."""
    return Row(state, event, arrow, tuple(dict.fromkeys(arms_of(get_type_hints(arrow)["return"]))))


def ignored(state: type, event: type) -> Row:
    return Row(state, event, lambda same, _, __: Transition(same), ((state,),))


def table(*rows: Row) -> Table:
    keyed = {(row.state, row.event): row for row in rows}
    assert len(keyed) == len(rows), "a (state, event) pair appears twice"
    return keyed


class IllegalEvent(Exception):
    """A bug: an event reached a state that can never see it."""


def step(rows: Table, state: object, event: object, known: object) -> AnyTransition:
    row = rows.get((type(state), type(event)))
    if row is None:
        raise IllegalEvent(f"{type(state).__name__} cannot see {type(event).__name__}")
    then = row.arrow(state, event, known)
    assert (type(then.state), *map(type, then.effects)) in row.arms, then
    return then
