"""Reads the text files of a checkpoint: tokenizer, chat template, end tokens and sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.config_fields import TOKENIZER, open_regular, read_json, read_optional
from adapters.checkpoint.gguf.gguf_text import read_gguf_text
from adapters.checkpoint.gguf.header import is_gguf
from adapters.checkpoint.tekken import TEKKEN_FILE, name_special_tokens, read_tekken
from adapters.checkpoint.text_content import TextContent

MAX_TEMPLATE_BYTES = 1 << 20
MAX_ENDS = 1 << 10


def read_text_files(path: Path) -> TextContent:
    """Read the text files of a folder or of a GGUF file. A folder may have a tekken.json in place of tokenizer.json.

    Raises CheckpointError that names the file that is missing or wrong.
    """
    if is_gguf(path):
        return read_gguf_text(path, MAX_TEMPLATE_BYTES)
    settings = read_optional(path / "tokenizer_config.json", TOKENIZER)
    generation = read_optional(path / "generation_config.json")
    config = read_optional(path / "config.json")
    tekken = path / TEKKEN_FILE
    if (path / "tokenizer.json").exists() or not tekken.is_file():
        tokenizer = read_json(path / "tokenizer.json", TOKENIZER)
    else:
        tokenizer = read_tekken(tekken)
        settings = {**name_special_tokens(tokenizer), **settings}
    return TextContent(
        tokenizer=tokenizer,
        settings=settings,
        generation=generation,
        end_tokens=find_end_tokens(generation, config),
        template=find_template(path, settings),
    )


def find_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template, from chat_template.jinja or else from tokenizer_config.json. None: there is none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        with open_regular(file) as opened:
            data = opened.read(MAX_TEMPLATE_BYTES + 1)
        if len(data) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"{file}: larger than {MAX_TEMPLATE_BYTES >> 20} MiB")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{file}: not UTF-8 text") from None
    found = settings.get("chat_template")
    if isinstance(found, list):
        default = [entry for entry in found if isinstance(entry, Mapping) and entry.get("name") == "default"]
        found = default[-1].get("template") if default else None
    if found is not None and not isinstance(found, str):
        raise CheckpointError(f"{folder}: tokenizer_config.json: chat_template is not a text")
    return found


def find_end_tokens(generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return `eos_token_id` of generation_config.json, or else of config.json or of its `text_config`."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else {}
    levels = (generation.get("eos_token_id"), config.get("eos_token_id"), text.get("eos_token_id"))
    value = next((level for level in levels if level is not None), None)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_ENDS:
        raise CheckpointError(f"eos_token_id is a list of {len(ids)}; accepted: up to {MAX_ENDS} token ids")
    vocab = text.get("vocab_size", config.get("vocab_size"))
    stop = vocab if isinstance(vocab, int) else 1 << 31
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < stop:
            raise CheckpointError(f"eos_token_id {describe_value(token)} is not a token id in 0..{stop - 1}")
    return tuple(ids)
