"""Renders a chat template, or tries grammars, in a process of its own, which its parent may kill. Run by path; needs
only jinja2 or llguidance.

Frames in both directions: four bytes of length (big endian), then JSON. The first frame is the set-up with `max_bytes`
and `seconds`, answered by `{"ok": ""}` or an error. With `{"template", "controls", "variables", "nonce", "max_chars"}`
every later frame holds the variables of one render; with `{"tokens", "special", "ends", "limits"}` it is a grammar,
or `{"rules"}`, in GBNF or Lark, to be answered as Lark, or `{"schemas"}`, a list of them, to be answered as JSON: what
`fit_schema.py` makes of each.
They are answered by `{"ok": text}` or `{"error": kind, "message": text}` with kind `refused` (the template's own
raise_exception, a grammar that cannot be used) or `failed`.

Marks: a control token counts only where the template itself writes it. So in the parsed template every constant that
may reach the output has its control tokens replaced by marks (a nonce that nobody outside can know, between two
Unicode noncharacters). Constants that are compared with, or split by, are left alone, so that templates which look for
`</think>` in a message still find it. What a client typed is never touched and can never be a mark. Where this cannot
follow a template (a token put together from parts, a text compared with a variable that holds one), the token is plain
text: it errs on the safe side, and `Text.check` warns at start.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Their arguments are looked for in a text, never written out.
SEARCHES = {
    *("count", "endswith", "find", "index", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind"),
    *("rindex", "rpartition", "rsplit", "rstrip", "split", "startswith", "strip"),
}
SELECTORS = {
    *("attr", "groupby", "map", "reject", "rejectattr", "replace", "select", "selectattr", "sort", "trim", "unique"),
}


class Refused(jinja2.TemplateError):
    """The template called raise_exception: the conversation is not one it can render. Or a grammar cannot be used."""


class Marker:
    """Control tokens to marks and back."""

    def __init__(self, controls: list[str], nonce: str) -> None:
        self.marks = {token: f"\ufdd0{nonce}\ufdd2{number}\ufdd1" for number, token in enumerate(controls)}
        longest_first = sorted(controls, key=len, reverse=True)
        self.tokens = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.controls = controls
        self.marked = re.compile(f"\ufdd0{nonce}\ufdd2([0-9]+)\ufdd1")

    def mark(self, text: str) -> str:
        return self.tokens.sub(lambda found: self.marks[found[0]], text)

    def plain(self, text: str) -> str:
        return self.marked.sub(lambda found: self.controls[int(found[1])], text)

    def mark_tree(self, node: nodes.Node) -> None:
        """Mark every constant below `node` that may reach the output."""
        match node:
            case nodes.TemplateData():
                node.data = self.mark(node.data)
            case nodes.Const(value=str()):
                node.value = self.mark(node.value)
            case nodes.Compare() | nodes.Test():
                pass
            case nodes.If() | nodes.CondExpr():
                self.mark_all(child for child in node.iter_child_nodes(exclude=["test"]))
            case nodes.For():
                self.mark_all(child for child in node.iter_child_nodes(exclude=["test"]))
            case nodes.Getitem():
                self.mark_tree(node.node)
            case nodes.Pair():
                self.mark_tree(node.value)
            case nodes.Filter() if node.name in SELECTORS:
                self.mark_all([node.node] if node.node else [])
            case nodes.Call(node=nodes.Getattr(attr=attr)) if attr in SEARCHES:
                self.mark_tree(node.node)
            case _:
                self.mark_all(node.iter_child_nodes())

    def mark_all(self, children: Any) -> None:
        for child in children:
            self.mark_tree(child)


class Sandbox(ImmutableSandboxedEnvironment):
    """As transformers sets it up for chat templates, less the ways to read the machine."""

    def __init__(self, marker: Marker) -> None:
        # optimized=False: constants are not folded while compiling, where no time limit would have begun yet
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], optimized=False)
        self.marker = marker
        self.filters["tojson"] = tojson
        self.globals = {
            "range": self.globals["range"],
            "namespace": self.globals["namespace"],
            "dict": self.globals["dict"],
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "raise_exception": self.refuse,
            "strftime_now": strftime_now,
        }

    def refuse(self, message: object) -> None:
        raise Refused(self.marker.plain(str(message)))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja's own names
        """Texts are searched for what a constant says, not for its mark: also when it came through a variable."""
        if isinstance(getattr(__obj, "__self__", None), str) and __obj.__name__ in SEARCHES:
            args = tuple(__self.marker.plain(arg) if isinstance(arg, str) else arg for arg in args)
        return super().call(__context, __obj, *args, **kwargs)


class Generation(Extension):
    """`{% generation %}` marks what a model writes, for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(layout: str) -> str:
    """Local time, as templates expect: read only by templates that ask for it."""
    return datetime.now().astimezone().strftime(layout)


class Renderer:
    def __init__(self, setup: dict[str, Any]) -> None:
        self.marker = Marker(setup["controls"], setup["nonce"])
        self.max_chars: int = setup["max_chars"]
        self.variables = {name: self.marker.mark(text) for name, text in setup["variables"].items()}
        sandbox = Sandbox(self.marker)
        tree = sandbox.parse(setup["template"])
        self.marker.mark_tree(tree)
        self.template = sandbox.from_string(tree)

    def render(self, variables: dict[str, Any]) -> str:
        parts, chars = [], 0
        for part in self.template.generate(self.variables | variables):
            chars += len(part)
            if chars > self.max_chars:
                raise OverflowError(f"the template wrote more than {self.max_chars} characters")
            parts.append(part)
        return "".join(parts)


class GrammarTrial:
    """Compiles grammars for a vocabulary; what costs too much ends this process, not the server's."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import llguidance  # noqa: PLC0415 - templates are rendered without it

        class Vocabulary:
            is_tokenizer_wrapper = True
            eos_token_id, bos_token_id = setup["ends"][0], None
            tokens = [bytes.fromhex(token) for token in setup["tokens"]]  # noqa: RUF012 - llguidance reads it so
            special_token_ids = setup["special"]

            def __call__(self, _: Any) -> list[int]:
                return []  # only what is forced would be tokenized, and nothing is answered here

        self.limits = llguidance.LLParserLimits(**setup["limits"])
        self.layout: dict[str, Any] = setup.get("layout", {})
        self.fitting = load_beside("fit_schema")  # before time is limited
        self.matcher = llguidance.LLMatcher
        vocabulary: Any = Vocabulary()
        self.tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=setup["ends"])

    def render(self, asked: str | dict[str, Any]) -> str:
        """Nothing, if the grammar can be used; with `rules`, these as Lark has them; with `schemas`, what fits."""
        if isinstance(asked, dict) and "schemas" in asked:
            return json.dumps(self.fitting.fitted(asked["schemas"], self.complaint))
        if isinstance(asked, dict):
            return self.translated(asked["rules"])
        found = self.matcher(self.tokenizer, asked, log_level=0, limits=self.limits)
        if found.is_error():
            raise Refused(found.get_error())
        return ""

    def complaint(self, schema: dict[str, Any]) -> str:
        """What is wrong with a schema, or nothing."""
        source = self.matcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": self.layout}))
        found = self.matcher(self.tokenizer, source, log_level=0, limits=self.limits)
        return str(found.get_error()) if found.is_error() else ""

    @staticmethod
    def translated(rules: str) -> str:
        """Time is limited for this, too: empty lines alone cost their number's square."""
        from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415 - templates are rendered without it

        try:
            return any_to_lark(rules)
        except Exception as error:  # noqa: BLE001 - the library raises plain ones
            raise Refused(f"it must be a grammar in GBNF or Lark: {' '.join(str(error).split())[:200]}") from None


def load_beside(name: str) -> Any:
    """A module that lies beside this file. This process knows no packages of ours."""
    found = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), f"{name}.py"))  # noqa: PTH118, PTH120 - one less import
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def answer(work: Any) -> dict[str, str]:
    """Do `work` and say what came of it, whatever came of it."""
    try:
        return {"ok": work()}
    except Refused as refusal:
        return {"error": "refused", "message": str(refusal)[:2000]}
    except MemoryError:
        return {"error": "failed", "message": "the template used too much memory"}
    except RecursionError:
        return {"error": "failed", "message": "the template calls itself without end"}
    except Exception as error:  # noqa: BLE001 - a template can raise anything; the parent is told
        return {"error": "failed", "message": f"{type(error).__name__}: {error}"[:2000]}


def receive(source: BinaryIO) -> Any:
    head = source.read(4)
    if len(head) < 4:
        raise EOFError
    return json.loads(source.read(struct.unpack(">I", head)[0]))


def send(sink: BinaryIO, reply: dict[str, str]) -> None:
    body = json.dumps(reply).encode()
    sink.write(struct.pack(">I", len(body)) + body)
    sink.flush()


def confine(max_bytes: int) -> None:
    """No more memory than this, no files, no further processes, no core dump."""
    limits = {
        resource.RLIMIT_AS: max_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for limit, most in limits.items():
        with contextlib.suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(limit, (most, most))


def limit(seconds: float) -> None:
    """End this process by SIGPROF after so much processor time, whatever it is at; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    source, sink = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    setup = receive(source)
    confine(setup["max_bytes"])
    made: list[Renderer | GrammarTrial] = []

    def set_up() -> str:
        made.append(Renderer(setup) if "template" in setup else GrammarTrial(setup))
        return ""

    if "template" in setup:
        limit(setup["seconds"])  # compiling computes, too; reading the model's own vocabulary is nobody's grammar
    send(sink, answer(set_up))
    while made:
        limit(0)
        asked = receive(source)
        limit(setup["seconds"])
        send(sink, answer(lambda given=asked: made[0].render(given)))


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError):
        main()
    sys.exit(0)
