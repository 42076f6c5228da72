"""The options of `rekindle chat`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from attrs import frozen
from cyclopts import Parameter
from cyclopts.validators import Number

from engine.tools.bench.bench_options import check_url


@frozen(kw_only=True)
class ChatOptions:
    """Options of `rekindle chat`."""

    url: Annotated[str, Parameter(validator=lambda kind, value: value and check_url(kind, value))] = ""
    """An OpenAI-compatible server, /v1 is added; by default ours at http://127.0.0.1:8000, started if it does not run.
    OPENAI_API_KEY is sent to a server that is named here, REKINDLE_API_KEY to ours."""

    system: Annotated[str, Parameter(show_default=False)] = ""
    """What the model is told before the conversation."""

    temperature: Annotated[float | None, Parameter(validator=Number(gte=0, lte=2))] = None
    """Of sampling; the server's own choice by default."""

    max_tokens: Annotated[int | None, Parameter(validator=Number(gte=1, lte=1 << 21))] = None
    """Of an answer, at most; the server's own limit by default."""

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    def choose_key(self, environment: Mapping[str, str]) -> str:
        """Return the key for the server.

        A key is sent only to the server that it was meant for. Our server may have several.
        """
        ours = environment.get("REKINDLE_API_KEY", "").split()[:1]
        return (self.url and environment.get("OPENAI_API_KEY", "")) or "".join(ours)
