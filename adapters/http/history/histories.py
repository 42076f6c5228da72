"""The memories of a server: what it keeps of earlier conversations."""

from __future__ import annotations

from attrs import field, frozen

from adapters.http.history.answer_tokens import TurnMemory
from adapters.http.history.frozen_messages import FrozenMessages
from adapters.http.history.history_loader import HistoryLoader
from adapters.http.history.response_store import ResponseStore


@frozen
class Histories:
    """All memories of one server. They end with the process unless they have a folder.

    turns: the tokens of answers. frozen_messages: what aged messages were frozen to; None: messages are not frozen.
    loader: reads the others at start; None: nothing is read.
    """

    responses: ResponseStore = field(factory=ResponseStore)
    turns: TurnMemory = field(factory=TurnMemory)
    frozen_messages: FrozenMessages | None = None
    loader: HistoryLoader | None = None
