"""How much of the form that a request asks for can be held, and the grammar that holds it. Used before admission.

A schema with `strict` is held as a whole or the request is refused: `SchemaRefused` names the keyword. Every other
schema is best effort: what cannot be held is left to the model, and the caller is told its path. The tries, until one
compiles:

1. Everything as it was asked for, each schema closed (`closed_schema.py`).
2. Each schema without the keywords that the compiler refuses (`Grammars.fit`).
3. Custom tools without the grammars of their inputs.
4. The smallest half of the tools, the smallest quarter, none: tools that do not fit together are left out by size,
   `strict` or not, and are called with any object. A form that costs too much keeps the type of its root.

What came of it is remembered, since agents send the same tools with every turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import anyio
from attrs import define, evolve, field, frozen

from adapters.text.answer.answer_parser import AnswerReader
from adapters.text.answer.whole_answer_grammar import answer_grammar, check_arguments, must_call
from adapters.text.conversation import FunctionTool
from adapters.text.grammars.closed_schema import closed_schema
from adapters.text.grammars.grammar import TOO_DEEP, Compiled, FittedSchema, GrammarRefused, Grammars, json_grammar
from adapters.text.tokenizer import Gone
from effects.grammar import Grammar

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
MOST_BOUNDED = 64  # tools whose integers are limited: 300 with two each are more than a lexer may cost, 100 are not
SHARES = (0.5, 0.25, 0.0)  # of the tools
MALFORMED = re.compile(r"Invalid type|[Ii]nvalid multiple of|must be (a|an) |Expected ")


class SchemaRefused(Exception):
    """A form that has to be held and cannot be. path: of the keyword, in the request."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path = path


@frozen
class AskedForm:
    """The form of an answer as a client asks for it, and where in the body.

    grammar: what holds it.  schema: what that was made of, if it is a JSON schema.  strict: may nothing be left out?
    """

    grammar: Grammar
    path: str
    schema: Mapping[str, Any] | None = None
    strict: bool = False


@frozen
class FittedForm:
    """grammar: None where nothing is held.  left_out: paths of what is left to the model."""

    grammar: Grammar | None
    compiled: Compiled | None = None
    left_out: tuple[str, ...] = ()


@define
class FormFitting:
    """The work for one request. reader: its tools are those that rules are made of, `strict` where they are held."""

    reader: AnswerReader
    form: AskedForm | None
    grammars: Grammars
    gone: Gone
    owner: str
    tools: dict[str, FunctionTool] = field(init=False)
    left_out: list[str] = field(factory=list, init=False)
    why: str = field(default="", init=False)  # the last try failed

    def __attrs_post_init__(self) -> None:
        self.tools = dict(self.reader.tools)

    @property
    def held_tools(self) -> list[FunctionTool]:
        return [tool for tool in self.tools.values() if tool.strict and tool.parameters is not None]

    async def fit(self) -> FittedForm:
        """Raises SchemaRefused, TooManyGrammars or GaveUp."""
        await anyio.to_thread.run_sync(self.close)
        grammar = await self.composed()
        if grammar is None and not self.why:
            return FittedForm(None, None, tuple(self.left_out))
        name = self.name(grammar)
        known = self.grammars.fitted.get(name)
        if known is not None:
            grammar, self.left_out = known[0], list(known[1])
        compiled = await self.compiled(grammar)
        if compiled is None and known is None:
            grammar, compiled = await self.with_less()
            self.left_out = list(dict.fromkeys(self.left_out))
            self.grammars.remember_fitted(name, grammar, tuple(self.left_out))
        return FittedForm(None if compiled is None else grammar, compiled, tuple(self.left_out))

    async def with_less(self) -> tuple[Grammar | None, Compiled | None]:
        """The second try and the third. Raises SchemaRefused."""
        if self.form is not None and self.form.schema is None and not self.held_tools:
            raise SchemaRefused(self.form.path, self.why)  # rules that a client wrote are right or wrong
        shares: Sequence[float] = SHARES[1:] if self.why.startswith("compiling it") else SHARES
        if self.grammars.tokenizer.end_tokens and await self.left_out_of_schemas():
            grammar = await self.composed()
            if (compiled := await self.compiled(grammar)) is not None:
                return grammar, compiled
        custom = [tool for tool in self.held_tools if tool.input_grammar is not None]
        for tool in custom:
            self.free(tool)
        if custom:
            grammar = await self.composed()
            if (compiled := await self.compiled(grammar)) is not None or not self.why:
                return grammar, compiled
        by_size = sorted(self.held_tools, key=lambda tool: len(json.dumps(tool.parameters)))
        for share in shares if by_size else (0.0,):
            for tool in by_size[int(share * len(by_size)) :]:
                self.free(tool)
            if not share:
                self.loosen_form()
            grammar = await self.composed()
            if (compiled := await self.compiled(grammar)) is not None or not self.why:
                return grammar, compiled
        if self.form is not None and (self.form.strict or self.form.schema is None):
            raise SchemaRefused(self.form.path, self.why)
        self.left_out.append("$.tools" if self.form is None else self.form.path)
        return None, None

    # -- tries

    async def composed(self) -> Grammar | None:
        """The grammar of the whole answer; None where nothing is held, or it cannot be made, and `why` says so."""
        reader, form = evolve(self.reader, tools=self.tools), None if self.form is None else self.form.grammar
        self.why = ""
        try:
            return await anyio.to_thread.run_sync(answer_grammar, reader, form, self.grammars.tokenizer.controls)
        except GrammarRefused as refused:
            self.why = str(refused)
            return None

    async def compiled(self, grammar: Grammar | None) -> Compiled | None:
        if grammar is None:
            return None
        try:
            return await self.grammars.admit(grammar, self.gone, self.owner)
        except GrammarRefused as refused:
            self.why = str(refused)
            return None

    def name(self, grammar: Grammar | None) -> str:
        """Of what is asked for: the same source may stand in another place of a body, and be strict or not."""
        said = ["" if grammar is None else grammar.digest, *(tool.path for tool in self.held_tools)]
        said += [str(tool.strict) for tool in self.reader.tools.values()]
        said += ["", ""] if self.form is None else [self.form.path, str(self.form.strict)]
        return blake2b("\0".join(said).encode(errors="replace"), digest_size=16).hexdigest()

    # -- what is held

    def close(self) -> None:
        """Decide which tools are held to their schema, and close what is held."""
        forced = must_call(self.reader)
        for name, tool in self.reader.tools.items():
            wanted = tool.strict or forced or tool.input_grammar is not None
            held = wanted and tool.parameters is not None and self.reader.choice.allows(name)
            self.tools[name] = evolve(tool, strict=False)
            if held:
                schema = self.closed(tool.parameters or {}, tool.path, strict=tool.strict)
                # arguments are an object, whether the schema says so or not
                self.hold(tool, schema if schema is None or "$ref" in schema else {"type": "object", **schema})
        if self.form is not None and self.form.schema is not None:
            schema = self.closed(self.form.schema, self.form.path, strict=True)
            self.form = evolve(self.form, grammar=json_grammar(schema or {}), schema=schema)

    def closed(self, schema: Mapping[str, Any], path: str, *, strict: bool) -> Mapping[str, Any] | None:
        try:
            found = closed_schema(schema, bound=len(self.reader.tools) <= MOST_BOUNDED)
            json.dumps(found)
        except RecursionError:
            if strict:
                raise SchemaRefused(path, TOO_DEEP) from None
            return None
        return found

    def hold(self, tool: FunctionTool, schema: Mapping[str, Any] | None) -> None:
        """Hold a tool to a schema, if its form of calls can. tool: as it was asked for. Raises SchemaRefused."""
        if schema is None:
            self.free(tool)
            return
        made = evolve(tool, strict=True, parameters=schema)
        try:
            check_arguments(self.reader, made)
        except GrammarRefused as refused:
            if tool.strict:
                raise SchemaRefused(tool.path + place_of(schema, str(refused)), str(refused)) from None
            self.free(tool)
            return
        self.tools[tool.name] = made

    def free(self, tool: FunctionTool) -> None:
        """Its calls are left to the model."""
        self.tools[tool.name] = evolve(self.reader.tools[tool.name], strict=False, input_grammar=None)
        self.left_out.append(tool.path)

    async def left_out_of_schemas(self) -> bool:
        """Leave out what the compiler refuses of each schema. Returns whether there was anything."""
        tools, before = self.held_tools, len(self.left_out)
        schema = None if self.form is None else self.form.schema
        schemas = [*(tool.parameters or {} for tool in tools), *([] if schema is None else [schema])]
        fitted = await self.grammars.fit(schemas, self.gone, self.owner) if schemas else []
        for tool, found in zip(tools, fitted, strict=False):
            asked = self.reader.tools[tool.name]
            if asked.strict and found.schema is not None:
                refuse_first(found, asked.path)
            if found.left_out:
                self.hold(asked, found.schema)
                self.left_out += [asked.path + path for path, _ in found.left_out]
        if self.form is not None and schema is not None:
            self.hold_form(self.form, fitted[-1])
        return len(self.left_out) > before

    def hold_form(self, form: AskedForm, found: FittedSchema) -> None:
        """A schema that is none is a client's mistake: it is named, `strict` or not."""
        wrong = [one for one in found.left_out if form.strict or MALFORMED.search(one[1])]
        refuse_first(evolve(found, left_out=tuple(wrong)), form.path)
        if found.schema is None:
            self.loosen_form()
        elif found.left_out:
            self.form = evolve(form, grammar=json_grammar(found.schema), schema=found.schema)
            self.left_out += [form.path + path for path, _ in found.left_out]

    def loosen_form(self) -> None:
        """Of a schema that costs too much, the type of the whole is left."""
        form = self.form
        if form is None or form.schema is None or form.strict:
            return
        kind = form.schema.get("type")
        outline = {"type": kind} if kind in TYPES else {}
        self.form = evolve(form, grammar=json_grammar(outline), schema=outline)
        self.left_out.append(form.path)


def refuse_first(found: FittedSchema, path: str) -> None:
    for where, why in found.left_out:
        raise SchemaRefused(path + where, why)


def place_of(schema: Any, message: str) -> str:
    """The path of the first keyword that a message names."""
    items = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for key, value in items:
        here = f".{key}" if isinstance(key, str) else f"[{key}]"
        if isinstance(key, str) and json.dumps(key) in message:
            return here
        if found := place_of(value, message):
            return here + found
    return ""
