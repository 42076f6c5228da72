"""Values at both ends of what a field of a wire message can hold, derived from the field's type."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeAlias

from msgspec import inspect, structs

from adapters.remote.protocol.messages import WireMessage

Variant: TypeAlias = tuple[str, Any]  # where it differs, and the whole value


def all_kinds(kind: type[WireMessage] = WireMessage) -> list[type[WireMessage]]:
    """Every kind of message, and of part of one."""
    found = [one for below in kind.__subclasses__() for one in (below, *all_kinds(below))]
    return list(dict.fromkeys(found))


def ends(kind: inspect.Type) -> tuple[Any, ...]:
    """The least and the most that a type holds; of a choice, everything."""
    found: tuple[Any, ...] = ()
    match kind:
        case inspect.IntType() | inspect.FloatType():
            found = kind.ge, kind.le
        case inspect.StrType(pattern=str()):
            found = "0" * 64, "f" * 64
        case inspect.StrType(max_length=int()):
            found = "x" * (kind.min_length or 0), "x" * kind.max_length
        case inspect.LiteralType():
            found = tuple(kind.values)
        case inspect.BoolType():
            found = False, True
        case inspect.NoneType():
            found = (None,)
        case inspect.VarTupleType(max_length=int()):
            item = ends(kind.item_type)[0]
            found = (item,) * (kind.min_length or 0), (item,) * kind.max_length
        case inspect.TupleType():
            found = tuple(zip(*map(of_pair, kind.item_types), strict=True))
        case inspect.UnionType():
            found = tuple(itertools.chain.from_iterable(map(ends, kind.types)))
        case inspect.StructType():
            found = (least(kind.cls),)
    bounded = found and (found[0] is not None or isinstance(kind, inspect.NoneType | inspect.UnionType))
    assert bounded, f"a wire message has a field without a bound: {kind}"
    return found


def of_pair(kind: inspect.Type) -> tuple[Any, Any]:
    found = ends(kind)
    return found[0], found[-1]


def least(kind: type[Any]) -> Any:
    """A message all of whose fields are at their lower ends."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return kind(**{field.name: ends(field.type)[0] for field in info.fields})


def variants(kind: inspect.Type, value: Any, path: str = "$") -> Iterator[Variant]:
    """`value` with one field, at whatever depth, at each of its ends."""
    match kind:
        case inspect.StructType():
            for field in kind.fields:
                own = getattr(value, field.name)
                for where, other in variants(field.type, own, f"{path}.{field.name}"):
                    yield where, structs.replace(value, **{field.name: other})
        case inspect.VarTupleType():
            item = value[0] if value else ends(kind.item_type)[0]
            yield f"{path}[:least]", value[: kind.min_length or 0]
            yield f"{path}[:most]", (item,) * kind.max_length  # type: ignore[operator] # `ends` has checked it
            for where, other in variants(kind.item_type, item, f"{path}[0]"):
                yield where, (other, *value[1:])
        case inspect.TupleType():
            for number, (one, own) in enumerate(zip(kind.item_types, value, strict=True)):
                for where, other in variants(one, own, f"{path}[{number}]"):
                    yield where, (*value[:number], other, *value[number + 1 :])
        case _:
            for other in ends(kind):
                yield f"{path}={str(other)[:20]}", other


def at_ends(message: WireMessage) -> Iterator[Variant]:
    yield from variants(inspect.type_info(type(message)), message)


def beyond(kind: inspect.Type, value: Any, path: str = "$") -> Iterator[Variant]:
    """`value` with one whole number outside of its bounds."""
    match kind:
        case inspect.StructType():
            for field in kind.fields:
                own = getattr(value, field.name)
                for where, other in beyond(field.type, own, f"{path}.{field.name}"):
                    yield where, structs.replace(value, **{field.name: other})
        case inspect.VarTupleType():
            item = value[0] if value else ends(kind.item_type)[0]
            for where, other in beyond(kind.item_type, item, f"{path}[0]"):
                yield where, (other, *value[1:])
        case inspect.IntType():
            assert kind.ge is not None
            assert kind.le is not None
            yield f"{path}={kind.ge - 1}", kind.ge - 1
            yield f"{path}={kind.le + 1}", kind.le + 1
        case _:
            return
