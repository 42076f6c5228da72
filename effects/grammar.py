"""What an answer has to keep to, as its source: pure data. Whoever picks tokens makes of it what it needs."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, TypeAlias

from attrs import frozen

GrammarKind: TypeAlias = Literal["json_schema", "regex", "lark"]


@frozen
class Grammar:
    """json_schema: the schema as JSON. regex: of the whole answer. lark: rules, from `start` on."""

    kind: GrammarKind
    source: str

    @property
    def digest(self) -> str:
        """Names it wherever the source would be too long."""
        return blake2b(f"{self.kind}\0{self.source}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
