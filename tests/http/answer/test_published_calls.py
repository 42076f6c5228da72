"""An agent's turns with published templates: calls that a random model makes under its grammar arrive, and go back.

Published templates are not part of this repository. `REKINDLE_TEMPLATES` names a folder with some, as NAME.jinja.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from adapters.text.answer.answer_parser import NONE, AnswerReader
from adapters.text.answer.answer_pieces import join_blocks
from adapters.text.answer.forms.harmony_calls import CONTROLS
from adapters.text.conversation import FunctionTool, ToolCall
from tests.http.answer.test_constrained_calls import ASKED, ASKS, make_folder, schema_of, speak
from tests.http.conftest import served
from tests.text import small
from tests.text.test_published_templates import MARKS, PUBLISHED, forms_of


def read_calls(form: str, text: str) -> list[tuple[str, Any]]:
    """Return the calls in a part of a prompt, with their arguments."""
    parser = AnswerReader(form, {"write": FunctionTool("write", None, schema_of(form))}).start_parser()
    blocks = join_blocks([*parser.push(text), *parser.finish()])
    return [(block.name, json.loads(block.arguments)) for block in blocks if isinstance(block, ToolCall)]


@pytest.mark.skipif(not PUBLISHED, reason="REKINDLE_TEMPLATES names no folder with published templates")
@pytest.mark.parametrize("name", [name for name in PUBLISHED if forms_of(name)[0] != NONE])
async def test_calls_arrive_and_the_next_prompt_shows_them(name: str, tmp_path: Path) -> None:
    source = PUBLISHED[name]
    own = CONTROLS if forms_of(name)[0] == "harmony" else ()
    controls = sorted({*MARKS.findall(source), *own} - {*small.SPECIAL, *small.VISIBLE})
    async with served(make_folder(tmp_path, source, controls), max_ctx=8192) as site:
        form = site.text.calls
        assert form == forms_of(name)[0]
        schema = schema_of(form)
        arrived = []
        for ask in ASKS:
            said: list[int] = []
            speak(site, 3, said)
            call = await ask(site, schema)
            assert call is not None
            assert call[1] == "write"
            arrived.append(json.loads(call[2]))
            jsonschema.validate(arrived[-1], schema)
            site.say("Well.")
            assert await ask(site, schema, call) is None
            prompt = site.text.tokenizer.decode(site.door.tickets[-1].job.prompt)
            assert read_calls(form, prompt[prompt.rindex(ASKED) :]) == [("write", arrived[-1])]
        assert arrived[0] == arrived[1] == arrived[2]
