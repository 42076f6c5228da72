"""The program of the confined process: it renders one chat template or tries grammars. Its parent may kill it.

`confined_worker.py` runs this file by its path. It imports only the standard library and jinja2 (or llguidance).

Protocol. Each frame has four bytes of length (big endian) and then JSON, in both directions. The first frame is the
set-up, with `max_bytes` and `seconds`. It is answered by `{"ok": ""}` or an error. The set-up decides the work:

* `{"template", "controls", "variables", "nonce", "max_chars"}`: each later frame holds the variables of one render.
* `{"tokens", "special", "ends", "limits", "layout"}`: each later frame is one of three requests. A text is a grammar,
  which is compiled. `{"rules"}` is GBNF or Lark, and the answer is Lark. `{"schemas"}` is a list of JSON schemas, and
  the answer is what `fit_schema.py` makes of each, as JSON.

The answer is `{"ok": text}` or `{"error": kind, "message": text}`. The kind is `refused` (the template called
raise_exception, or a grammar cannot be used) or `failed`.

Marks. A control token counts only where the template itself writes it. So every constant of the parsed template that
may reach the output has its control tokens replaced by marks. A mark is a secret nonce between two Unicode
noncharacters. Constants that a template compares with, or splits by, stay as they are: a template that looks for
`</think>` in a message still finds it. The text of a client is never changed and can never hold a mark.

Some templates cannot be followed: they put a token together from parts, or compare a text with a variable that holds
one. Such a token is plain text. This errs on the safe side, and `Text.check` warns at start.
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
from typing import TYPE_CHECKING, Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:  # this process cannot import our packages
    from adapters.text.confined_setup import GrammarSetup, RendererSetup

# Methods of a text whose arguments are searched for and never written out.
SEARCHES = {
    *("count", "endswith", "find", "index", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind"),
    *("rindex", "rpartition", "rsplit", "rstrip", "split", "startswith", "strip"),
}
# Filters whose arguments name attributes or tests and are never written out.
SELECTORS = {
    *("attr", "groupby", "map", "reject", "rejectattr", "replace", "select", "selectattr", "sort", "trim", "unique"),
}


class Refused(jinja2.TemplateError):
    """The template called raise_exception for this conversation, or a grammar cannot be used."""


class Marker:
    """Replaces control tokens by marks, and marks by control tokens."""

    def __init__(self, controls: list[str], nonce: str) -> None:
        self.marks = {token: f"\ufdd0{nonce}\ufdd2{number}\ufdd1" for number, token in enumerate(controls)}
        longest_first = sorted(controls, key=len, reverse=True)
        self.tokens = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.controls = controls
        self.marked = re.compile(f"\ufdd0{nonce}\ufdd2([0-9]+)\ufdd1")

    def mark(self, text: str) -> str:
        return self.tokens.sub(lambda found: self.marks[found[0]], text)

    def unmark(self, text: str) -> str:
        return self.marked.sub(lambda found: self.controls[int(found[1])], text)

    def mark_tree(self, node: nodes.Node) -> None:
        """Mark the control tokens in every constant below `node` that may reach the output."""
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
    """The environment that transformers uses for chat templates, without the functions that read the machine."""

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
        raise Refused(self.marker.unmark(str(message)))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja's own names
        """Call a function. A text is searched for the control token itself, not for its mark.

        The argument may have come through a variable, so marking constants alone cannot ensure this.
        """
        if isinstance(getattr(__obj, "__self__", None), str) and __obj.__name__ in SEARCHES:
            args = tuple(__self.marker.unmark(arg) if isinstance(arg, str) else arg for arg in args)
        return super().call(__context, __obj, *args, **kwargs)


class Generation(Extension):
    """Renders the body of `{% generation %}` unchanged. The tag marks what a model writes and is meant for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(layout: str) -> str:
    """Format the local time, as templates expect it."""
    return datetime.now().astimezone().strftime(layout)


class Renderer:
    """Renders one template. The output is limited to `max_chars` characters."""

    def __init__(self, setup: RendererSetup) -> None:
        self.marker = Marker(setup["controls"], setup["nonce"])
        self.max_chars = setup["max_chars"]
        self.variables = {name: self.marker.mark(text) for name, text in setup["variables"].items()}
        sandbox = Sandbox(self.marker)
        tree = sandbox.parse(setup["template"])
        self.marker.mark_tree(tree)
        self.template = sandbox.from_string(tree)

    def render(self, variables: dict[str, Any]) -> str:
        """Return the rendered text. Raises OverflowError where it is too long."""
        parts = []
        chars = 0
        for part in self.template.generate(self.variables | variables):
            chars += len(part)
            if chars > self.max_chars:
                raise OverflowError(f"the template wrote more than {self.max_chars} characters")
            parts.append(part)
        return "".join(parts)


class GrammarTrial:
    """Compiles grammars for one vocabulary. A grammar that costs too much ends this process, not the server.

    seconds: processor time of one request, which the schemas of a request share.
    """

    def __init__(self, setup: GrammarSetup, seconds: float) -> None:
        import llguidance  # noqa: PLC0415 - templates are rendered without it

        class Vocabulary:
            is_tokenizer_wrapper = True
            eos_token_id = setup["ends"][0]
            bos_token_id = None
            tokens = [bytes.fromhex(token) for token in setup["tokens"]]  # noqa: RUF012 - llguidance reads it so
            special_token_ids = setup["special"]

            def __call__(self, _: Any) -> list[int]:
                return []  # only forced text would be tokenized, and this process generates no answers

        self.limits = llguidance.LLParserLimits(**setup["limits"])
        self.layout = setup["layout"]
        self.seconds = seconds
        self.schema_module = load_sibling_module("fit_schema")  # loaded before processor time is limited
        self.matcher = llguidance.LLMatcher
        vocabulary: Any = Vocabulary()
        self.tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=setup["ends"])

    def render(self, asked: str | dict[str, Any]) -> str:
        """Answer one request, see the head of this file. A grammar that can be used gives the empty text."""
        if isinstance(asked, dict) and "schemas" in asked:
            return json.dumps(self.schema_module.fit_schemas(asked["schemas"], self.find_complaint, self.seconds))
        if isinstance(asked, dict):
            return self.translate_rules(asked["rules"])
        found = self.matcher(self.tokenizer, asked, log_level=0, limits=self.limits)
        if found.is_error():
            raise Refused(found.get_error())
        return ""

    def find_complaint(self, schema: dict[str, Any]) -> str:
        """Compile a schema and return the compiler's complaint, or the empty text."""
        source = self.matcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": self.layout}))
        found = self.matcher(self.tokenizer, source, log_level=0, limits=self.limits)
        return str(found.get_error()) if found.is_error() else ""

    @staticmethod
    def translate_rules(rules: str) -> str:
        """Translate GBNF or Lark to Lark. This may be slow as well: the cost grows with the square of empty lines."""
        from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415 - templates are rendered without it

        try:
            return any_to_lark(rules)
        except Exception as error:  # noqa: BLE001 - the library raises plain ones
            raise Refused(f"it must be a grammar in GBNF or Lark: {' '.join(str(error).split())[:200]}") from None


def load_sibling_module(name: str) -> Any:
    """Load a module from the folder of this file. This process cannot import our packages."""
    found = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), f"{name}.py"))  # noqa: PTH118, PTH120 - one less import
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def run_and_reply(work: Any) -> dict[str, str]:
    """Run `work` and return its answer frame. Every exception becomes an error frame."""
    try:
        return {"ok": work()}
    except Refused as refusal:
        return {"error": "refused", "message": str(refusal)[:2000]}
    except MemoryError:
        return {"error": "failed", "message": "the template used too much memory"}
    except RecursionError:
        return {"error": "failed", "message": "the template calls itself without end"}
    except Exception as error:  # noqa: BLE001 - a template can raise anything, and the parent must learn of it
        return {"error": "failed", "message": f"{type(error).__name__}: {error}"[:2000]}


def receive_frame(source: BinaryIO) -> Any:
    head = source.read(4)
    if len(head) < 4:
        raise EOFError
    return json.loads(source.read(struct.unpack(">I", head)[0]))


def send_frame(sink: BinaryIO, reply: dict[str, str]) -> None:
    body = json.dumps(reply).encode()
    sink.write(struct.pack(">I", len(body)) + body)
    sink.flush()


def confine(max_bytes: int) -> None:
    """Limit this process to `max_bytes` of address space. Forbid written files, child processes and core dumps.

    A limit that this system does not have, or that cannot be set, is left out. Linux lets root have child processes
    whatever the limit is.
    """
    limits = {
        resource.RLIMIT_AS: max_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for limit, most in limits.items():
        with contextlib.suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(limit, (most, most))


def limit_processor_time(seconds: float) -> None:
    """End this process by SIGPROF after `seconds` of processor time. 0 means no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Read frames from standard input and answer them until the parent closes the pipe."""
    source = os.fdopen(0, "rb")
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that nothing else can write to the pipe of answers
    setup = receive_frame(source)
    confine(setup["max_bytes"])
    made: list[Renderer | GrammarTrial] = []

    def set_up() -> str:
        made.append(Renderer(setup) if "template" in setup else GrammarTrial(setup, setup["seconds"]))
        return ""

    if "template" in setup:
        # Compiling a template may be slow as well. A vocabulary is the model's own and is read without a limit.
        limit_processor_time(setup["seconds"])
    send_frame(sink, run_and_reply(set_up))
    while made:
        limit_processor_time(0)
        asked = receive_frame(source)
        limit_processor_time(setup["seconds"])
        send_frame(sink, run_and_reply(lambda given=asked: made[0].render(given)))


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError):
        main()
    sys.exit(0)
