"""The names of row formats in `--kv-dtype`. Imports no torch, because options are read before it is."""

from __future__ import annotations

KV_TYPES = ("auto", "bf16", "fp8", "int8", "int4", "int3.5")  # auto: the format of the computation
ACCEPTED = f"{', '.join(KV_TYPES)}, or k=TYPE,v=TYPE with one of them each"


def read_pair(text: str) -> tuple[str, str]:
    """Return the types of keys and of values that a text names: one for both, or `k=` and `v=` one each.

    A part that is not named is auto. Raises ValueError.
    """
    found = {"k": text, "v": text}
    if "=" in text:
        named = [part.split("=", 1) for part in text.split(",")]
        if any(len(one) < len(found) for one in named) or len({one[0] for one in named}) < len(named):
            raise ValueError(f"{text[:80]!r}; accepted: {ACCEPTED}")
        found = {"k": "auto", "v": "auto"} | dict(named)
    if set(found) != {"k", "v"} or not set(found.values()).issubset(KV_TYPES):
        raise ValueError(f"{text[:80]!r}; accepted: {ACCEPTED}")
    return found["k"], found["v"]
