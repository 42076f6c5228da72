"""Messages about models that are not served: what is accepted, or what is missing. They need no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from adapters.checkpoint.checkpoint_error import describe_value
from adapters.models import ARCHITECTURES, FAMILIES, MISSING, MISSING_ARCHITECTURES


def explain_refused_type(model_type: object) -> str:
    """Return the message about a `model_type` of config.json that is not served."""
    return explain(f"config.json: model_type {describe_value(model_type)}", model_type, MISSING, FAMILIES)


def explain_refused_architecture(architecture: str) -> str:
    """Return the message about a `general.architecture` of a GGUF file that is not served."""
    named = f"general.architecture {describe_value(architecture)}"
    return explain(named, architecture, MISSING_ARCHITECTURES, ARCHITECTURES)


def explain(named: str, kind: object, missing: Mapping[str, str], accepted: Iterable[str]) -> str:
    if isinstance(kind, str) and kind in missing:
        return f"{named} needs {missing[kind]}, which is not supported"
    return f"{named} is not supported; accepted: {', '.join(map(repr, accepted))}"
