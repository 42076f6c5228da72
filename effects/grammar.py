"""The grammar that an answer has to follow, as source text. The sampler compiles it."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, TypeAlias

from attrs import frozen

GrammarKind: TypeAlias = Literal["json_schema", "regex", "lark"]


@frozen
class Grammar:
    """A grammar for an answer."""

    kind: GrammarKind
    source: str  # json_schema: the schema as JSON; regex: of the whole answer; lark: rules that begin with `start`

    @property
    def digest(self) -> str:
        """A name for the grammar, where its source would be too long."""
        return blake2b(f"{self.kind}\0{self.source}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
