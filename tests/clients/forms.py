"""instructor against the demo, whose answers are held to its schemas: `python -m tests.clients.forms`.

It needs instructor (`pip install instructor`), which nothing else here does. It asks for a pydantic model in each of
its modes that have a schema, ten times each, without retries, so a form that was not held fails to validate. Its mode
JSON has the schema in the prompt only (`response_format` is `json_object`). There the answer has to be an object, and
whether it is the right one depends on the model. It prints a line for each mode, and exits with 1 if one of them fails.
"""

from __future__ import annotations

import enum
import importlib
import json
import sys
from typing import Any

import openai
from pydantic import BaseModel, Field

from tests.e2e.server import serving
from tests.plain_http import NO_TLS

SEEDS = 10
MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA")


class Species(enum.StrEnum):
    CAT = "cat"
    DOG = "dog"


class Home(BaseModel):
    street: str = Field(max_length=20)
    number: int


class Pet(BaseModel):
    """A pet."""

    name: str = Field(description="What it is called", max_length=20)
    age: int = Field(ge=0, le=30)
    tame: bool
    kind: Species
    home: Home | None = None
    tags: list[Species] = Field(default_factory=list, max_length=2)


def main() -> int:
    instructor: Any = importlib.import_module("instructor")
    failed = 0
    with serving() as server:
        plain = openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key="x",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=NO_TLS),
        )
        how: dict[str, Any] = {"model": "demo", "max_tokens": 400, "temperature": 1.0}
        how["messages"] = [{"role": "user", "content": "Tom is a tame cat of three years."}]
        for name in MODES:
            client = instructor.from_openai(plain, mode=getattr(instructor.Mode, name))
            wrong = 0
            for seed in range(SEEDS):
                try:
                    client.create(response_model=Pet, max_retries=0, seed=seed, **how)
                except Exception as error:  # noqa: BLE001 - whatever it is, that mode does not pass
                    wrong += 1
                    sys.stdout.write(f"{name} {seed} {' '.join(str(error).split())[:300]}\n")
            sys.stdout.write(f"{name}: {SEEDS - wrong} of {SEEDS}\n")
            failed += wrong
        said = plain.chat.completions.create(response_format={"type": "json_object"}, **{**how, "max_tokens": 2000})
        choice = said.choices[0]
        right = choice.finish_reason == "length" or isinstance(json.loads(choice.message.content or ""), dict)
        sys.stdout.write(f"JSON: {'an object' if right else 'no object'}\n")
        failed += not right
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
