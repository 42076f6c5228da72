"""Finds the grammar that enforces as much as possible of the form that a request asks for. Used before admission.

A schema with `strict` is enforced as a whole, or the request is refused: `SchemaRefused` names the keyword. Every other
schema is best effort. What cannot be enforced is left to the model, and the answer reports its path. These are tried in
turn, until one compiles:

1. Everything as it was asked for, with each schema closed (`closed_schema.py`).
2. Each schema without the keywords that the compiler refuses (`Grammars.fit_schemas`).
3. Custom tools without the grammars of their inputs.
4. Only the smallest half of the tools, then the smallest quarter, then none. The other tools are called with any
   object, even if they are `strict`. A form that costs too much keeps only the type of its root.

The result is remembered, since agents send the same tools with every turn.
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
from adapters.text.answer.whole_answer_grammar import build_answer_grammar, check_arguments, must_call
from adapters.text.conversation import FunctionTool
from adapters.text.grammars.closed_schema import close_schema
from adapters.text.grammars.grammar import (
    TOO_DEEP,
    CompiledGrammar,
    FittedSchema,
    GrammarRefused,
    Grammars,
    build_json_grammar,
)
from adapters.text.tokenizer import DisconnectCheck
from effects.grammar import Grammar

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
# The most tools for which integers are limited. 300 tools with two integers each exceed the cost that a lexer may
# have, and 100 do not.
MAX_BOUNDED_TOOLS = 64
KEPT_TOOL_SHARES = (0.5, 0.25, 0.0)  # of the tools
MALFORMED = re.compile(r"Invalid type|[Ii]nvalid multiple of|must be (a|an) |Expected ")


class SchemaRefused(Exception):
    """A form must be enforced and cannot be. `path` is that of the keyword in the request."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path = path


@frozen
class RequestedForm:
    """The form of an answer that a client asks for.

    grammar: enforces the form.
    path: where the form stands in the request's body.
    schema: the JSON schema that the grammar was made of, if there is one.
    strict: nothing may be left out.
    """

    grammar: Grammar
    path: str
    schema: Mapping[str, Any] | None = None
    strict: bool = False


@frozen
class FittedForm:
    """The result for one request.

    grammar: None where nothing is enforced.
    left_out: JSON paths in the request of what is left to the model.
    """

    grammar: Grammar | None
    compiled: CompiledGrammar | None = None
    left_out: tuple[str, ...] = ()


@define
class FormFitter:
    """Fits the form and the tools of one request.

    tools: the tools from which rules are made. `strict` means here that a tool's calls are constrained.
    failure: why the last try failed, or the empty text.
    """

    reader: AnswerReader
    form: RequestedForm | None
    grammars: Grammars
    is_disconnected: DisconnectCheck
    owner: str
    tools: dict[str, FunctionTool] = field(init=False)
    left_out: list[str] = field(factory=list, init=False)
    failure: str = field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        self.tools = dict(self.reader.tools)

    @property
    def constrained_tools(self) -> list[FunctionTool]:
        return [tool for tool in self.tools.values() if tool.strict and tool.parameters is not None]

    async def fit(self) -> FittedForm:
        """Return the best grammar that compiles. Raises SchemaRefused, TooManyGrammars or ClientLeft."""
        await anyio.to_thread.run_sync(self.choose_constraints)
        grammar = await self.compose()
        if grammar is None and not self.failure:
            return FittedForm(None, None, tuple(self.left_out))
        name = self.form_key(grammar)
        known = self.grammars.fitted_forms.get(name)
        if known is not None:
            grammar = known[0]
            self.left_out = list(known[1])
        compiled = await self.compile(grammar)
        if compiled is None and known is None:
            grammar, compiled = await self.fit_with_less()
            self.left_out = list(dict.fromkeys(self.left_out))
            self.grammars.remember_fitted(name, grammar, tuple(self.left_out))
        return FittedForm(None if compiled is None else grammar, compiled, tuple(self.left_out))

    async def fit_with_less(self) -> tuple[Grammar | None, CompiledGrammar | None]:
        """Try the steps 2 to 4 of the head of this file. Raises SchemaRefused."""
        if self.form is not None and self.form.schema is None and not self.constrained_tools:
            # Nothing can be left out of rules that a client wrote.
            raise SchemaRefused(self.form.path, self.failure)
        shares: Sequence[float] = KEPT_TOOL_SHARES[1:] if self.failure.startswith("compiling it") else KEPT_TOOL_SHARES
        if self.grammars.tokenizer.end_tokens and await self.fit_schemas():
            grammar = await self.compose()
            if (compiled := await self.compile(grammar)) is not None:
                return grammar, compiled
        custom = [tool for tool in self.constrained_tools if tool.input_grammar is not None]
        for tool in custom:
            self.release_tool(tool)
        if custom:
            grammar = await self.compose()
            if (compiled := await self.compile(grammar)) is not None or not self.failure:
                return grammar, compiled
        by_size = sorted(self.constrained_tools, key=lambda tool: len(json.dumps(tool.parameters)))
        for share in shares if by_size else (0.0,):
            for tool in by_size[int(share * len(by_size)) :]:
                self.release_tool(tool)
            if not share:
                self.loosen_form()
            grammar = await self.compose()
            if (compiled := await self.compile(grammar)) is not None or not self.failure:
                return grammar, compiled
        if self.form is not None and (self.form.strict or self.form.schema is None):
            raise SchemaRefused(self.form.path, self.failure)
        self.left_out.append("$.tools" if self.form is None else self.form.path)
        return None, None

    # -- tries

    async def compose(self) -> Grammar | None:
        """Return the grammar of the whole answer. None: nothing is enforced, or `failure` says why there is none."""
        reader = evolve(self.reader, tools=self.tools)
        form = None if self.form is None else self.form.grammar
        self.failure = ""
        try:
            return await anyio.to_thread.run_sync(build_answer_grammar, reader, form, self.grammars.tokenizer.controls)
        except GrammarRefused as refused:
            self.failure = str(refused)
            return None

    async def compile(self, grammar: Grammar | None) -> CompiledGrammar | None:
        """Compile a grammar. None: there is none, or `failure` says why it cannot be used."""
        if grammar is None:
            return None
        try:
            return await self.grammars.admit(grammar, self.is_disconnected, self.owner)
        except GrammarRefused as refused:
            self.failure = str(refused)
            return None

    def form_key(self, grammar: Grammar | None) -> str:
        """Return the key by which the result is remembered.

        The key depends on paths and on `strict` too, since the same source may stand elsewhere in another request.
        """
        said = ["" if grammar is None else grammar.digest, *(tool.path for tool in self.constrained_tools)]
        said += [str(tool.strict) for tool in self.reader.tools.values()]
        said += ["", ""] if self.form is None else [self.form.path, str(self.form.strict)]
        return blake2b("\0".join(said).encode(errors="replace"), digest_size=16).hexdigest()

    # -- what is held

    def choose_constraints(self) -> None:
        """Decide which tools must keep to their schema, and close these schemas."""
        forced = must_call(self.reader)
        for name, tool in self.reader.tools.items():
            wanted = tool.strict or forced or tool.input_grammar is not None
            held = wanted and tool.parameters is not None and self.reader.choice.allows(name)
            self.tools[name] = evolve(tool, strict=False)
            if held:
                schema = self.close_schema(tool.parameters or {}, tool.path, strict=tool.strict)
                # Arguments are an object even where the schema does not say so.
                self.constrain_tool(
                    tool, schema if schema is None or "$ref" in schema else {"type": "object", **schema}
                )
        if self.form is not None and self.form.schema is not None:
            schema = self.close_schema(self.form.schema, self.form.path, strict=True)
            self.form = evolve(self.form, grammar=build_json_grammar(schema or {}), schema=schema)

    def close_schema(self, schema: Mapping[str, Any], path: str, *, strict: bool) -> Mapping[str, Any] | None:
        """Return the closed schema. None: it is nested too deeply, and not strict. Raises SchemaRefused."""
        try:
            found = close_schema(schema, bound=len(self.reader.tools) <= MAX_BOUNDED_TOOLS)
            json.dumps(found)
        except RecursionError:
            if strict:
                raise SchemaRefused(path, TOO_DEEP) from None
            return None
        return found

    def constrain_tool(self, tool: FunctionTool, schema: Mapping[str, Any] | None) -> None:
        """Constrain a tool's calls to a schema, if its form of calls can express it. Raises SchemaRefused.

        tool: the tool as the client sent it. schema: None leaves its calls to the model.
        """
        if schema is None:
            self.release_tool(tool)
            return
        made = evolve(tool, strict=True, parameters=schema)
        try:
            check_arguments(self.reader, made)
        except GrammarRefused as refused:
            if tool.strict:
                raise SchemaRefused(tool.path + find_keyword_path(schema, str(refused)), str(refused)) from None
            self.release_tool(tool)
            return
        self.tools[tool.name] = made

    def release_tool(self, tool: FunctionTool) -> None:
        """Leave the calls of a tool to the model."""
        self.tools[tool.name] = evolve(self.reader.tools[tool.name], strict=False, input_grammar=None)
        self.left_out.append(tool.path)

    async def fit_schemas(self) -> bool:
        """Remove from each schema what the compiler refuses. Return whether anything was removed."""
        tools = self.constrained_tools
        before = len(self.left_out)
        schema = None if self.form is None else self.form.schema
        schemas = [*(tool.parameters or {} for tool in tools), *([] if schema is None else [schema])]
        fitted = await self.grammars.fit_schemas(schemas, self.is_disconnected, self.owner) if schemas else []
        for tool, found in zip(tools, fitted, strict=False):
            asked = self.reader.tools[tool.name]
            if asked.strict and found.schema is not None:
                raise_first_omission(found, asked.path)
            if found.left_out:
                self.constrain_tool(asked, found.schema)
                self.left_out += [asked.path + path for path, _ in found.left_out]
        if self.form is not None and schema is not None:
            self.constrain_form(self.form, fitted[-1])
        return len(self.left_out) > before

    def constrain_form(self, form: RequestedForm, found: FittedSchema) -> None:
        """Use the fitted schema for the form. A malformed schema is the client's mistake and is refused in any case."""
        wrong = [keyword for keyword in found.left_out if form.strict or MALFORMED.search(keyword[1])]
        raise_first_omission(evolve(found, left_out=tuple(wrong)), form.path)
        if found.schema is None:
            self.loosen_form()
        elif found.left_out:
            self.form = evolve(form, grammar=build_json_grammar(found.schema), schema=found.schema)
            self.left_out += [form.path + path for path, _ in found.left_out]

    def loosen_form(self) -> None:
        """Reduce a schema that costs too much to the type of its root."""
        form = self.form
        if form is None or form.schema is None or form.strict:
            return
        kind = form.schema.get("type")
        outline = {"type": kind} if kind in TYPES else {}
        self.form = evolve(form, grammar=build_json_grammar(outline), schema=outline)
        self.left_out.append(form.path)


def raise_first_omission(found: FittedSchema, path: str) -> None:
    for where, why in found.left_out:
        raise SchemaRefused(path + where, why)


def find_keyword_path(schema: Any, message: str) -> str:
    """Return the path of the first keyword in the schema that a message names, or the empty text."""
    items = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for key, value in items:
        here = f".{key}" if isinstance(key, str) else f"[{key}]"
        if isinstance(key, str) and json.dumps(key) in message:
            return here
        if found := find_keyword_path(value, message):
            return here + found
    return ""
