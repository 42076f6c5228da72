"""Tests of grammars: what may follow at every place, and that no client can make the server pay for one."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import jsonschema
import numpy as np
import pytest

from adapters.text.confined_worker import ConfinedWorker, WorkReply
from adapters.text.grammars import grammar
from adapters.text.grammars.compile_queue import MAX_WAITING, MAX_WAITING_PER_OWNER, TooManyGrammars
from adapters.text.grammars.grammar import (
    LAYOUT,
    LIMITS,
    MAX_BYTES,
    MAX_KEPT,
    MAX_SOURCE_CHARS,
    CompiledGrammar,
    GrammarMatching,
    GrammarRefused,
    Grammars,
    Vocabulary,
    build_json_grammar,
    to_library_source,
)
from adapters.text.tokenizer import ClientLeft, Tokenizer
from effects.grammar import Grammar
from tests.pairs import one_in
from tests.schemas import schema_of
from tests.text import small

ENDS = (2, 0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(small.write(tmp_path_factory.mktemp("small")))


@pytest.fixture
async def grammars(tokenizer: Tokenizer) -> AsyncIterator[Grammars]:
    made = Grammars(tokenizer)
    yield made
    await made.aclose()


async def stays() -> bool:
    return False


def following(matching: GrammarMatching, path: tuple[int, ...] = ()) -> set[int] | str:
    mask = matching.mask(path)
    if isinstance(mask, str):
        return mask
    return set(np.unpackbits(mask, bitorder="little").nonzero()[0].tolist())


def test_a_mask_depends_on_the_tokens_before_it_and_on_no_call_before_it(tokenizer: Tokenizer) -> None:
    """Walks that go ahead, come back and branch off see what a straight walk sees."""
    grammars, draw = Grammars(tokenizer), random.Random(3)
    for seed in range(12):
        grammar = build_json_grammar(schema_of(seed))
        walked, said = grammars.match(grammar), list[int]()
        while True:
            allowed = following(walked)
            fresh = grammars.match(grammar)
            fresh.append(said)
            assert isinstance(allowed, set)
            assert following(fresh) == allowed
            path: tuple[int, ...] = ()
            for _ in range(draw.randint(0, 4)):  # some of what follows, of which a part stays
                ahead = following(walked, path)
                assert isinstance(ahead, set)
                if path and path[-1] in ENDS:
                    break
                path += (draw.choice(sorted(ahead)),)
                assert walked.count_allowed(path) == len(path)
            wrong = next((token for token in range(tokenizer.size) if token not in allowed and token not in ENDS), None)
            assert wrong is None or walked.count_allowed((wrong, *path)) == 0
            kept = path[: draw.randint(1, len(path))] if path else (draw.choice(sorted(allowed)),)
            walked.append(kept)
            said += kept
            if said[-1] in ENDS:
                break
        jsonschema.validate(json.loads(tokenizer.decode(said[:-1])), schema_of(seed))


def test_a_proposal_beyond_the_vocabulary_of_the_tokenizer_keeps_to_no_grammar(tokenizer: Tokenizer) -> None:
    """Vocabularies of models are padded, and a draft may propose any of their ids."""
    (word,) = tokenizer.encode_now(["abc"])
    matching = Grammars(tokenizer).match(Grammar("lark", 'start: "abc" "def"'))
    assert matching.count_allowed((*word, tokenizer.size)) == len(word)
    assert matching.count_allowed((tokenizer.size + 99, *word)) == 0
    assert matching.count_allowed(word) == len(word)
    assert isinstance(matching.mask(word), np.ndarray)


def test_behind_a_complete_answer_only_the_end_may_follow(tokenizer: Tokenizer) -> None:
    matching = Grammars(tokenizer).match(Grammar("regex", "ab?"))
    (tokens,) = tokenizer.encode_now(["a"])
    matching.append(tokens)
    (more,) = tokenizer.encode_now(["b"])
    assert following(matching) == {*ENDS, *more}
    matching.append(more)
    assert following(matching) == set(ENDS)


def test_control_tokens_are_no_text_and_are_meant_where_a_grammar_names_them(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer)
    controls = {control.id for control in tokenizer.controls.values()}
    free = following(grammars.match(Grammar("regex", "(?s:.)*")))
    assert isinstance(free, set)
    assert free & controls == set(ENDS)
    named = grammars.match(Grammar("lark", 'start: <tool_call> "x"'))
    assert following(named) == {tokenizer.controls["<tool_call>"].id}


async def test_what_is_admitted_is_kept_and_what_nobody_used_for_long_is_not(grammars: Grammars) -> None:
    for number in range(MAX_KEPT + 3):
        await grammars.admit(Grammar("regex", f"a{number}"), stays)
    assert grammars._find_compiled(Grammar("regex", "a0")) is None  # noqa: SLF001 - how much is kept shows nowhere else
    assert grammars._find_compiled(Grammar("regex", f"a{MAX_KEPT}")) is not None  # noqa: SLF001
    assert following(grammars.match(Grammar("regex", "a0"))) != set(), "and is made again where it is needed"


async def test_of_grammars_that_took_long_to_compile_fewer_are_kept_and_held(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    costly = [await grammars.admit(Grammar("regex", f"d{number}"), stays) for number in range(2)]
    assert all(one.seconds > 0 for one in costly)
    assert grammars._find_compiled(Grammar("regex", "d1")) is costly[1]  # noqa: SLF001 - as above
    monkeypatch.setattr(grammar, "MAX_KEPT_SECONDS", costly[1].seconds / 2)
    monkeypatch.setattr(grammar, "MAX_HELD_SECONDS", 0.0)
    with pytest.raises(TooManyGrammars):
        await grammars.admit(Grammar("regex", "d2"), stays)
    assert await grammars.admit(Grammar("regex", "d1"), stays) is costly[1], "what is there costs nothing more"
    grammars.match(Grammar("regex", "d1"))
    costly.clear()
    with anyio.fail_after(20):  # the event loop and the thread that compiled let go of what they have handed over
        while any(grammars._find_compiled(Grammar("regex", f"d{number}")) for number in range(2)):  # noqa: SLF001
            await anyio.sleep(0.01)
            gc.collect()
    assert await grammars.admit(Grammar("regex", "d2"), stays)


async def test_what_waits_for_its_turn_is_not_compiled_again(grammars: Grammars) -> None:
    waiting = await grammars.admit(Grammar("regex", "b"), stays)
    for number in range(MAX_KEPT + 1):
        await grammars.admit(Grammar("regex", f"b{number}"), stays)
    assert await grammars.admit(Grammar("regex", "b"), stays) is waiting


async def test_who_leaves_in_the_line_costs_nothing_and_the_line_ends(grammars: Grammars) -> None:
    async def leaves() -> bool:
        return True

    with pytest.raises(ClientLeft):
        await grammars.admit(Grammar("regex", "c"), leaves)
    with pytest.raises(ClientLeft):
        await grammars.translate_rules("start: c", leaves)
    found: list[CompiledGrammar] = []
    refused: list[TooManyGrammars] = []

    async def ask(number: int) -> None:
        try:
            found.append(await grammars.admit(Grammar("regex", f"c{number // 2}"), stays))
        except TooManyGrammars as error:
            refused.append(error)

    async with anyio.create_task_group() as tasks:
        for number in range(MAX_WAITING + 3):
            tasks.start_soon(ask, number)
    assert (len(found), len(refused)) == (MAX_WAITING + 1, 2)
    assert len(set(map(id, found))) == MAX_WAITING // 2 + 1, "two want the same, and it is made once"


@pytest.mark.parametrize("keys", [1, 2, 6])
async def test_every_api_key_has_a_share_of_the_line_and_keys_take_turns(grammars: Grammars, keys: int) -> None:
    served: list[str] = []
    refused: list[str] = []

    async def ask(owner: str, number: int) -> None:
        try:
            await grammars.admit(Grammar("regex", f"{owner}{number}"), stays, owner)
            served.append(owner)
        except TooManyGrammars:
            refused.append(owner)

    async with anyio.create_task_group() as tasks, grammars.queue.wait_turn("other"):
        for number in range(2 * MAX_WAITING):
            tasks.start_soon(ask, "greedy", number)
        await anyio.wait_all_tasks_blocked()
        assert (grammars.queue.waiting_count, len(refused)) == (
            MAX_WAITING_PER_OWNER,
            2 * MAX_WAITING - MAX_WAITING_PER_OWNER,
        )
        for key in range(1, keys):
            for number in range(MAX_WAITING_PER_OWNER if key % 2 else 1):
                tasks.start_soon(ask, f"key{key}", number)
        await anyio.wait_all_tasks_blocked()
    assert set(refused) <= {"greedy", "key5"}, "the line is as long as it may be with four of them"
    first = served[:keys]
    assert len(set(first)) == keys, (
        "one of each key before the second of any, and who has nothing in the line is let in"
    )


async def test_who_is_cancelled_in_the_line_leaves_it_and_keeps_nobody_waiting(grammars: Grammars) -> None:
    for step in range(3):
        async with anyio.create_task_group() as tasks, grammars.queue.wait_turn(""):
            with anyio.move_on_after(0):
                await grammars.admit(Grammar("regex", f"x{step}"), stays)
            tasks.start_soon(grammars.admit, Grammar("regex", f"y{step}"), stays)
            await anyio.wait_all_tasks_blocked()
            if step:  # called and cancelled in the same moment
                tasks.cancel_scope.cancel()
        assert grammars.queue.waiting_count == 0
        with anyio.fail_after(20):
            await grammars.admit(Grammar("regex", f"z{step}"), stays)


async def test_a_key_has_a_share_of_what_is_held(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_OWNER_SECONDS", 0.0)
    mine = await grammars.admit(Grammar("regex", "s0"), stays, "mine")
    with pytest.raises(TooManyGrammars):
        await grammars.admit(Grammar("regex", "s1"), stays, "mine")
    assert await grammars.admit(Grammar("regex", "s1"), stays, "theirs")
    assert mine.owner == "mine"


async def test_rules_are_read_beside_the_server(grammars: Grammars) -> None:
    assert (await grammars.translate_rules("start: a\na: /x/", stays)).source == "start: a\na: /x/"
    assert "start:" in (await grammars.translate_rules('root ::= "a"', stays)).source


REFUSED: dict[str, tuple[Grammar, str]] = {
    "regex": (Grammar("regex", "(a"), "unclosed group"),
    "lark": (Grammar("lark", "start: a"), "unknown name"),
    "empty": (Grammar("regex", r"[^\s\S]"), "no text keeps to it"),
    "never ends": (build_json_grammar({"$ref": "#"}), "no text keeps to it, or none comes to an end"),
    "keyword": (build_json_grammar({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
    "type": (build_json_grammar({"type": "text"}), "Invalid type"),
    "impossible": (build_json_grammar({"type": "integer", "minimum": 3, "maximum": 2}), "minimum (3) is greater"),
    "elsewhere": (build_json_grammar({"$ref": "http://127.0.0.1:1/schema.json"}), "Default retriever does not fetch"),
    "file": (build_json_grammar({"$ref": "file:///etc/passwd"}), "Default retriever does not fetch"),
    "no object": (Grammar("json_schema", "[1"), ""),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_used_is_refused_and_says_why(grammars: Grammars, name: str) -> None:
    grammar, why = REFUSED[name]
    with pytest.raises(GrammarRefused) as refused:
        await grammars.admit(grammar, stays)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def expanding(depth: int) -> dict[str, Any]:
    """2**depth integers."""
    pair = {
        f"d{level}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{level + 1}"}] * 2, "minItems": 2}
        for level in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**pair, f"d{depth}": {"type": "integer"}}}


HOSTILE: dict[str, Grammar] = {
    "deep": build_json_grammar(nested(60)),
    "too deep": Grammar("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "huge": build_json_grammar({"enum": ["x" * MAX_SOURCE_CHARS]}),
    "wide": build_json_grammar({"type": "object", "properties": {f"p{at}": {} for at in range(6000)}}),
    "many values": build_json_grammar({"enum": [f"v{at}" for at in range(6000)]}),
    "multiples": build_json_grammar(
        {"prefixItems": [{"type": "integer", "multipleOf": 99991 + at} for at in range(50)]}
    ),
    "long texts": build_json_grammar({"items": {"type": "string", "minLength": 9000, "maxLength": 60000}}),
    "expanding": build_json_grammar(expanding(60)),
    "unions of unions": build_json_grammar(
        {"allOf": [{"anyOf": [{"properties": {f"x{at}": {"const": one}}} for one in range(4)]} for at in range(12)]}
    ),
    "references in circles": build_json_grammar(
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}},
        }
    ),
    "exponential regex": Grammar("regex", "((a|b)*a(a|b){20}){20}"),
    "repeated regex": Grammar("regex", "(((a{1,99}){1,99}){1,99}){1,99}b"),
    "ambiguous rules": Grammar("lark", 'start: s\ns: s s | s s s | "a" | ""'),
    "endless rules": Grammar("lark", "start: a\na: b\nb: a"),
    "no rules": Grammar("lark", "\0" * 1000),
}


@pytest.fixture
async def hasty(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Grammars]:
    """Grammars with a quarter of the usual time, so that those that take all of it take less."""
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", grammar.COMPILE_SECONDS / 4)
    made = Grammars(tokenizer)
    yield made
    await made.aclose()


@pytest.mark.usefixtures("workers_start_in_full")
@one_in(2, "name")
@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_grammars_are_refused_or_cost_little(hasty: Grammars, name: str) -> None:
    """A grammar that takes too much processor time or memory is compiled in a process that is killed. The next one is
    served.
    """
    grammars = hasty
    draw = random.Random(name)
    with suppress(GrammarRefused):
        await grammars.admit(HOSTILE[name], stays)
        matching = grammars.match(HOSTILE[name])
        for _ in range(40):
            allowed = following(matching)
            if isinstance(allowed, str) or allowed <= set(ENDS):
                break
            matching.append([draw.choice(sorted(allowed - set(ENDS)))])
    await grammars.admit(Grammar("regex", "fine"), stays)
    assert following(grammars.match(Grammar("regex", "fine"))), "whatever became of the process that tried the other"


# By default `tests/http/request/test_form.py` has a grammar that takes as long.
@pytest.mark.long
async def test_what_costs_too_much_is_killed_and_says_so(grammars: Grammars) -> None:
    with pytest.raises(GrammarRefused, match=r"compiling it (took more than 2 s of processor time|ended its process)"):
        await grammars.admit(HOSTILE["multiples"], stays)


async def test_a_large_vocabulary_costs_no_grammar_its_time() -> None:
    """It is read once for the process that tries grammars, and what is limited is each of these."""
    words = [f"{at:x}".encode().hex() for at in range(1, 200_000)]
    bytes_ = [f"{at:02x}" for at in range(256)]
    setup = {"tokens": [*bytes_, *words, b"<end>".hex()], "special": [256 + len(words)], "ends": [256 + len(words)]}
    trial = ConfinedWorker(lambda: {**setup, "limits": LIMITS, "layout": LAYOUT}, 0.2, MAX_BYTES, 1 << 20)
    assert await trial.ask(to_library_source(Grammar("regex", "ab?"))) == WorkReply("")
    await trial.aclose()


async def test_a_server_that_ends_while_one_is_tried_refuses_it(grammars: Grammars) -> None:
    refused: list[GrammarRefused] = []

    async def ask() -> None:
        with pytest.raises(GrammarRefused, match="ended its process") as found:
            await grammars.admit(HOSTILE["multiples"], stays)
        refused.append(found.value)

    await grammars.admit(Grammar("regex", "a"), stays)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.sleep(0.1)
        await grammars.aclose()
    assert refused


def test_nobody_waits_while_the_vocabulary_is_read(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, locked = Grammars(tokenizer), list[bool]()

    def tokens(self: Vocabulary) -> list[bytes]:
        locked.append(grammars._lock.locked())  # noqa: SLF001 - the event loop waits for this one
        return [self.tokenizer.token_bytes(token) for token in range(self.tokenizer.size)]

    monkeypatch.setattr(Vocabulary, "tokens", property(tokens))
    grammars.match(Grammar("regex", "a"))
    assert locked
    assert not any(locked)


async def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(GrammarRefused, match="nested too deeply"):
        build_json_grammar(schema)


async def test_a_model_without_an_end_token_keeps_to_no_grammar(tmp_path: Path) -> None:
    folder = small.write(tmp_path)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(GrammarRefused, match="no end token"):
        await Grammars(Tokenizer.load(folder)).admit(Grammar("regex", "a"), stays)


def test_a_digest_names_kind_and_source() -> None:
    made = {Grammar("regex", "a").digest, Grammar("lark", "a").digest, Grammar("regex", "b").digest}
    assert len(made) == 3
    assert Grammar("regex", "a").digest in made
