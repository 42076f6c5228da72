"""Layers with windows, in the layout of Gemma 4 31B: what 20,000 tokens take, and what a restart reads of them.

    python -m benchmarks.window_restart [--tokens 20000] [--record]

memory: the bytes of a sequence's rows on a GPU, which are counted without one, above those of all rows of full layers
and one window of the others. It is the published shape in bfloat16, with chunks of 1024 tokens. Checkpoints that a
server keeps on the device besides (`--state-checkpoints`) are not counted. restart: a model with
that layout and small widths answers a prompt on this processor, and its process is killed (`kill -9`). Another one
answers the same prompt. Counted are the bytes that it reads from disk, above those of one window and of the rows of
full layers that it restores. The answers must have the same tokens and log-probabilities.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from adapters import demo
from adapters.models.decoder.layer_index import LayerIndex, build_rows, build_states
from adapters.models.decoder.shard import ShardPlacement, ShardSpec
from adapters.models.kernels.interfaces.delta_interface import CHUNK
from adapters.models.open_checkpoint import Checkpoint
from benchmarks.arguments import benchmark_parser
from benchmarks.first_requests import listening, wait_until_written
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import print_table
from effects.ids import PAGE
from tests.models.checkpoints import save_model
from tests.models.windowed import FULL, GEMMA4, KEYS_AS_VALUES, LAYOUT_31B, SLIDING, parse_config

TOKENS, WINDOW, ANSWER = 20_000, 1024, 8
TABLE_ENTRY = 4  # bytes
# The 31B model has 50 layers with a window of 1024 rows, with 16 key heads of 256, and 10 full ones with 4 of 512.
SHAPE_31B = {
    **GEMMA4,
    **KEYS_AS_VALUES,
    "hidden_size": 5376,
    "num_hidden_layers": 60,
    "layer_types": [*[SLIDING] * 5, FULL] * 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "num_global_key_value_heads": 4,
    "global_head_dim": 512,
    "sliding_window": WINDOW,
    "max_position_embeddings": 32768,
}
SMALL = {
    **GEMMA4,
    **KEYS_AS_VALUES,
    **LAYOUT_31B,
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "eos_token_id": 1,
}


class OnPages:
    """The facts about a GPU's kernels that the memory estimate for rows needs."""

    is_paged = True


@frozen
class RowMemory:
    """Bytes of the rows of all slots on a GPU.

    taken: allocated. estimated: as the memory planner counts them, without tables. tables: of pages. needed: all rows
    of full layers and one window of the others.
    """

    taken: int
    estimated: int
    tables: int
    needed: int

    @property
    def excess(self) -> float:
        """Percent of what is needed."""
        return 100 * (self.taken / self.needed - 1)


def count_row_memory(slots: int, chunk: int, tokens: int = TOKENS) -> RowMemory:
    """Count what rows of Gemma 4 31B take on a GPU, in bfloat16. chunk: tokens of a prompt's step at most."""
    config = parse_config("gemma4_text", SHAPE_31B)
    dtype = torch.bfloat16
    layers = range(config.num_layers)
    index = LayerIndex(config, layers)
    pages = slots * -(-tokens // PAGE)
    how: dict[str, Any] = {"slots": slots, "capacity": tokens, "buckets": (chunk,)}
    how |= {"dtype": dtype, "device": torch.device("meta")}
    spec = ShardSpec(layers=layers, vocab_size=config.vocab_size, **how)
    rows = build_rows(config, index, spec, ShardPlacement(pages=pages, **how), paged=True)
    states = build_states(config, index, spec, ShardPlacement(pages=pages, **how), OnPages())  # type: ignore[arg-type]
    assert states is not None
    held, checkpoint = config.state_bytes(dtype, "cuda")
    full_row = config.kv_bytes_per_token(dtype)
    return RowMemory(
        taken=rows.nbytes + states.nbytes,
        estimated=pages * PAGE * full_row + slots * held + config.shared_bytes(dtype, chunk),
        tables=TABLE_ENTRY * slots * (-(-tokens // PAGE) + len(index.windowed) * -(-tokens // CHUNK)),
        needed=slots * (checkpoint + tokens * full_row),
    )


def restart(folder: Path, tokens: int) -> dict[str, Any]:
    """Answer a prompt, kill the server, start it again, and answer it once more."""
    model, home = folder / "model", folder / "home"
    for one in (model, home):
        one.mkdir()
    save_model(model, "gemma4_text", **SMALL)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.FOLDER / name, model)
    prompt = [10 + 37 * n % 4000 for n in range(tokens)]
    body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "logprobs": 2}
    words = [sys.executable, "-m", "engine", "serve", "--model", str(model), "--draft", "none", "--device", "cpu"]
    words += ["--port", "0", "--kv-cache-dir", str(folder / "kv"), "--max-ctx", str(tokens + 480), "--slots", "1"]
    with listening(words, home) as (client, process, _):
        cold = client.post("/v1/completions", json=body).raise_for_status().json()
        wait_until_written(client, 0)
        process.kill()
        process.wait(30)
    with listening(words, home) as (client, _, _):
        warm = client.post("/v1/completions", json=body).raise_for_status().json()
        restores = client.get("/props").json()["full_cache"]["restores"]["disk"]
    config = Checkpoint.open(model).config
    assert config.dtype is not None
    reused = warm["rekindle"]["restored_tokens"]
    assert reused >= tokens - 1 - CHUNK, f"{reused} of {tokens} tokens were restored"
    row, window = config.kv_bytes_per_token(config.dtype), config.state_bytes(config.dtype)[1]
    return {
        "tokens": tokens,
        "restored": reused,
        "bytes read": restores["bytes"],
        "bytes needed": reused * row + window,
        "same answer": warm["choices"] == cold["choices"],
    }


def make_figures(memory: RowMemory, found: Mapping[str, Any]) -> list[Figure]:
    at = f"{found['tokens']:,} tokens"
    subject = "Gemma-4-31B's layout, rows of a sequence above the arithmetic"
    spare = found["bytes read"] - found["bytes needed"]
    return [
        Figure("memory", subject, at, "%", memory.excess, goal=Goal(at_most=5)),
        Figure("restart", "small widths, bytes read in vain", at, "B", spare, goal=Goal(at_most=0)),
    ]


def measure(given: argparse.Namespace) -> None:
    memory = count_row_memory(1, 1024, given.tokens)
    with tempfile.TemporaryDirectory() as folder:
        found = restart(Path(folder), given.tokens)
    print_table("A restart with windows", [found])
    raw = {"gpu rows": {"taken": memory.taken, "needed": memory.needed, "excess, %": memory.excess}, "restart": found}
    publish(given, "window_restart", raw, make_figures(memory, found), "cpu")
    assert found["same answer"], "another answer after the restart"


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
