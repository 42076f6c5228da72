"""Loads a model's tokenizer and template on a thread while torch is imported, since they do not need torch."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import anyio.to_thread

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.text.model_text import Text
from engine.settings.model_options import ModelOptions
from engine.settings.paths import find_model_folder
from engine.settings.user_error import UserError

log = logging.getLogger("rekindle")
Reading: TypeAlias = Future[Text]  # raises CheckpointError if the text side cannot be used


def begin_text(model: ModelOptions) -> Reading:
    """Begin to load the text side of a model.

    Opening torch's libraries blocks the importing thread and leaves the interpreter idle for 0.1 s. That is the time
    that a vocabulary of 150,000 entries takes to parse. Later, parsing would keep the interpreter from the lane.
    """
    executor = ThreadPoolExecutor(1, "text")
    chosen = (None if name == "auto" else name for name in (model.tool_parser, model.reasoning_parser))
    reading = executor.submit(Text.load, find_model_folder(model), *chosen)
    executor.shutdown(wait=False)
    return reading


async def load_text(model: ModelOptions, reading: Reading) -> Text:
    """Wait for the text side. Raises UserError with one line for a folder that cannot be used."""
    from adapters.models.open_checkpoint import Checkpoint  # noqa: PLC0415 - needs torch

    folder = find_model_folder(model)
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
