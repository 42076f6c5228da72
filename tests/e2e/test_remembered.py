"""Tool loops on the demo whose clients drop reasoning and write arguments anew: nothing that was generated is computed
again, with `kill -9` in between.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from adapters.demo import FOLDER
from tests.e2e.prepared import serving
from tests.e2e.server import Running
from tests.e2e.test_restart import written
from tests.http.history.test_turn_memory import ApiTalk, ChatTalk, MessagesTalk, ResponsesTalk

BLOCK = 64
FILE = "def area(width, height): return width * height  # number %d, of some length\\\\n" * 2
ANSWER = (
    'start: <think> "\\nHm, the user wants the area.\\n" </think> "\\n\\nLet me add it. \\n" <tool_call> '
    '"\\n{\\"name\\": \\"add\\", \\"arguments\\": {\\"a\\":  1.0, \\"b\\" : \\"%s\\"}}\\n" </tool_call>'
)
DIALECTS: list[type[ApiTalk]] = [ChatTalk, MessagesTalk, ResponsesTalk]


def model(folder: Path) -> Path:
    """The demo with a template that shows what was thought since the last question."""
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("draft", "hybrid", "__pycache__", "*.py"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    content = "text(message.content) }}\n{%- for call"
    shown = (
        "('<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' if message.reasoning_content and "
        "not messages[loop.index:] | selectattr('role', 'equalto', 'user') | list else '') + "
    )
    assert settings["chat_template"].count(content) == 1
    settings["chat_template"] = settings["chat_template"].replace(content, shown + content)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def used(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens of the prompt, those that were not computed, and those of the answer; the same in every API."""
    if "prompt_tokens" in usage:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], cached, usage["completion_tokens"]
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached, usage["output_tokens"]


def turn(server: Running, talk: ApiTalk, number: int) -> tuple[int, int, int, int]:
    """Tokens that were remembered, and the others of `used`."""
    body = {**talk.body(), "grammar": ANSWER % (FILE.replace("%d", str(number)))}
    response = server.client.post(talk.path, json={**body, "temperature": 1, "seed": number})
    assert response.status_code == 200, response.text
    answer = response.json()
    talk.answered(answer)
    return answer["rekindle"]["remembered"], *used(answer["usage"])


def settled(server: Running, turns: Path, count: int) -> None:
    """All is on disk."""
    end = time.monotonic() + 60
    while len(list(turns.glob("turn_*"))) < count:
        assert time.monotonic() < end
        time.sleep(0.05)
    written(server)


@pytest.mark.timeout(300)
def test_nothing_that_was_generated_is_computed_again(tmp_path: Path) -> None:
    talks = [dialect() for dialect in DIALECTS]
    for number, talk in enumerate(talks):
        talk.says(f"Conversation {number}.")
    words = ("--model", str(model(tmp_path / "model")), "--kv-cache-dir", str(tmp_path / "kv"))
    ends = [0] * len(talks)  # rows that there are of each conversation
    for start in range(2):
        with serving(*words, "--kv-cache-min-tokens", "64", trusting=True) as server:
            for index, talk in enumerate(talks):
                remembered, prompt, cached, made = turn(server, talk, 10 * start + index)
                assert (remembered > 0) == (ends[index] > 0)
                assert cached >= ends[index] // BLOCK * BLOCK, (start, index)
                assert made > BLOCK
                ends[index] = prompt + made - 1  # what ended the answer has no row
            settled(server, tmp_path / "kv" / "turns", (start + 1) * len(talks))
            server.stop(signal.SIGKILL)
