"""A server that knows the secret and makes no sense, and a process that stands still: refused by name, and ended."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from adapters.remote.client import dial
from adapters.remote.client.dial import Launched
from adapters.remote.protocol.channel import is_failure
from adapters.remote.protocol.lent_memory import Lender
from adapters.remote.protocol.messages import (
    Commit,
    Described,
    Failure,
    Forwarded,
    Lent,
    LentRun,
    Op,
    RunStep,
    Settle,
    Stepped,
    StepSettled,
    WireMessage,
    decode_message,
    encode_message,
)
from adapters.remote.protocol.payload_tensors import find_offsets
from adapters.remote.protocol.slot_messages import CopyRows, ImportRows, ImportRuns, RowSpan, SlotCheckpoint
from tests.models.splits import CONFIGS, chunk
from tests.remote.daemons import RandomModel, Threads, remote

HYBRID = CONFIGS["hybrid"]
NUMBERS = (0, 1, 2, 3, 4, 5, 16, 64, 100, 511, 512, 513, 1 << 16, (1 << 31) - 1)
WORDS = 100


def nonsense(draw: random.Random, names: tuple[str, ...]) -> tuple[Op, WireMessage]:
    """Well framed, with arguments that are what the op has, and now and then even sensible."""

    def number() -> int:
        return draw.choice(NUMBERS)

    segments = tuple((draw.choice((0, 1, number())), number(), draw.choice((1, 2, number()))) for _ in range(2))
    step = Stepped(segments, draw.choice((4, 16, 7)), draw.random() < 0.5)
    shape = tuple(number() for _ in range(draw.randrange(4)))
    tensors = (Described(draw.choice(("tokens", "hidden", names[0])), draw.choice(("I64", "F32")), shape),)
    lent = (Lent(names, "BF16", shape, draw.choice((0, 64, 1 << 40)), number(), tuple(map(abs, shape))),)
    words: dict[Op, WireMessage] = {
        Op.FORWARD: RunStep(step, tensors),
        Op.LOGITS: RunStep(step, tensors),
        Op.COMMIT: Commit(step, (number(), (number(),))),
        Op.SETTLE: Settle(step),
        Op.SETTLED: StepSettled(draw.random() < 0.5),
        Op.COPY_ROWS: CopyRows(number(), number(), number()),
        Op.EXPORT_ROWS: RowSpan(number(), number(), number()),
        Op.IMPORT_ROWS: ImportRows(number(), number(), *draw.choice(((tensors,), ((), lent)))),
        Op.IMPORT_RUNS: ImportRuns(number(), (LentRun(number(), number(), draw.choice((0, 64, 1 << 40)), number()),)),
        Op.KEEP_STATE: SlotCheckpoint(number(), number()),
        Op.LOAD_STATE: SlotCheckpoint(number(), number()),
    }
    return draw.choice([*words.items()])


@pytest.mark.timeout(120)
def test_words_without_sense_are_refused_and_the_next_are_understood() -> None:
    lender, draw = Lender.open(), random.Random(4)
    assert lender is not None
    lender.take(1 << 20)
    served = Threads(RandomModel(HYBRID), lender=lender)
    far, said = remote(served, range(HYBRID.num_layers)), Counter[str]()
    channel = far.peer._channel  # noqa: SLF001 - what no peer says
    assert channel is not None
    for request in range(1 << 20, (1 << 20) + WORDS):
        op, message = nonsense(draw, far.rows.spec.names)
        size = find_offsets(getattr(message, "tensors", ()))[1]
        sent = [torch.zeros(size, dtype=torch.uint8)] if 0 < size < 1 << 20 else []
        channel.send(op, request, encode_message(message), sent, seconds=50)
        frame = channel.answer(op, request, 50)
        said[decode_message(frame.arguments, Failure).kind if is_failure(frame) else "done"] += 1
    assert said["refused"] > WORDS // 2
    assert set(said) <= {"refused", "done"}, "and nothing fails that could have been refused"
    chunk(far, 0, 0, 64)
    far.close()


@pytest.mark.parametrize("token", [-1, HYBRID.vocab_size, 1 << 40])
def test_what_is_no_token_is_looked_up_nowhere(token: int) -> None:
    served = Threads(RandomModel(HYBRID))
    far = remote(served, range(HYBRID.num_layers))
    for kind, given in (("I64", torch.tensor([3, token])), ("F32", torch.zeros(2))):
        asked = RunStep(Stepped(((0, 0, 2),), 4, rows_only=False), (Described("tokens", kind, (2,)),))
        with pytest.raises(ValueError, match="tokens"):
            far.peer.ask(Op.FORWARD, asked, Forwarded, [given])
    chunk(far, 0, 0, 64)
    assert far.peer.restarts == 0
    far.close()


def test_a_process_that_was_stopped_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "LEAVE_S", 0.2)
    child = Launched("ipc+cpu:0", [sys.executable, "-c", "import time; time.sleep(1000)"], {})
    channel = child.open()
    process = child._process  # noqa: SLF001 - nothing else stops it
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert child.end() == "its process was killed"
    assert not Path(f"/proc/{process.pid}").exists()
    channel.close()
