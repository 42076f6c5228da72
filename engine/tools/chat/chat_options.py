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
    """Address of an OpenAI-compatible server; /v1 is added. By default a Rekindle server at http://127.0.0.1:8000,
    which is started if it does not run. A server that is named here receives OPENAI_API_KEY, the default one
    REKINDLE_API_KEY."""

    system: Annotated[str, Parameter(show_default=False)] = ""
    """System prompt of the conversation."""

    temperature: Annotated[float | None, Parameter(validator=Number(gte=0, lte=2))] = None
    """Sampling temperature. By default the server chooses."""

    max_tokens: Annotated[int | None, Parameter(validator=Number(gte=1, lte=1 << 21))] = None
    """Maximum tokens of an answer. By default the limit of the server."""

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    def choose_key(self, environment: Mapping[str, str]) -> str:
        """Return the key for the server.

        A key is sent only to the server that it was meant for. Our server may have several.
        """
        ours = environment.get("REKINDLE_API_KEY", "").split()[:1]
        return (self.url and environment.get("OPENAI_API_KEY", "")) or "".join(ours)
