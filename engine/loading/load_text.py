"""A model's tokenizer and template are read on a thread, since torch is not needed for them: while that is imported."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import anyio.to_thread

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.text.model_text import Text
from engine.settings.options import Options
from engine.settings.paths import model_folder
from engine.settings.user_error import UserError

log = logging.getLogger("rekindle")
Reading: TypeAlias = Future[Text]  # CheckpointError where it cannot be used


def begin_text(options: Options) -> Reading:
    """Opening torch's libraries keeps whoever imports it waiting, and the interpreter idle, for 0.1 s, which is what
    a vocabulary of 150,000 entries takes to parse. Beside a lane, it would keep that from the interpreter.
    """
    beside = ThreadPoolExecutor(1, "text")
    chosen = (None if name == "auto" else name for name in (options.tool_parser, options.reasoning_parser))
    reading = beside.submit(Text.load, model_folder(options), *chosen)
    beside.shutdown(wait=False)
    return reading


async def load_text(options: Options, reading: Reading) -> Text:
    """Before the model, which takes longer. Raises Refusal with one line for a folder that cannot be used."""
    from adapters.models.open_checkpoint import Checkpoint  # noqa: PLC0415 - needs torch

    folder = model_folder(options)
    try:
        vocab = Checkpoint.open(folder).config.vocab_size
        text = await anyio.to_thread.run_sync(reading.result)
        warnings = await text.check()
    except CheckpointError as error:
        raise UserError(str(error) if str(error).startswith(str(folder)) else f"{folder}: {error}") from error
    if (size := text.tokenizer.size) > vocab:
        await text.aclose()
        raise UserError(f"{folder}: the tokenizer has ids up to {size - 1}, but the model's vocab_size is {vocab}")
    for warning in warnings:
        log.warning(warning)
    return text
