"""A model whose layers mostly have windows: a restart reads what a continuation needs, and no row more."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapters import demo
from adapters.models.decoder.config.rope import Rotary
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.open_checkpoint import Checkpoint
from tests.e2e.prepared import serving
from tests.e2e.server import Running
from tests.e2e.test_restart import kill, written
from tests.models.checkpoints import save_model
from tests.models.draft_models import FULL as ALL_ROWS
from tests.models.draft_models import random_tensors, save_draft
from tests.models.windowed import FULL, GEMMA3, GEMMA4, SHARING, SLIDING

WINDOW, TOKENS, BLOCK = 1024, 20_000, 64
# Of the layers of the 31B model five of six have a window, and their heads are smaller than those of the others.
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING] * 5 + [FULL],
    "max_position_embeddings": 32768,
    "eos_token_id": 1,
}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_restart_reads_the_rows_of_full_layers_and_one_window_of_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(folder, "gemma4_text", **GEMMA4 | SHAPE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.FOLDER / name, folder)
    prompt = [10 + 37 * n % 4000 for n in range(TOKENS)]
    asked = {"max_tokens": 8, "temperature": 0, "logprobs": 2}
    words = (str(folder), "--kv-cache-dir", str(tmp_path / "kv"), "--max-ctx", "20480", "--slots", "1")
    with serving(*words) as server:
        cold = server.complete(prompt, **asked).json()
        written(server, 2)
        kill(server)
    with serving(*words) as server:
        warm = server.complete(prompt, **asked).json()
        restored = server.client.get("/props").json()["full_cache"]["restores"]["disk"]
        assert server.stop() == 0
    assert warm["choices"] == cold["choices"]
    reused = warm["rekindle"]["restored_tokens"]
    assert reused >= TOKENS - 1 - BLOCK
    config = Checkpoint.open(folder).config
    dtype = config.dtype
    assert dtype is not None
    window = config.state_bytes(dtype)[1]
    assert restored["bytes"] == reused * config.kv_bytes_per_token(dtype) + window


PROMPTS = [[10 + (37 * n + 11 * number * n) % 4000 for n in range(200 + number % 150)] for number in range(300)]
MODELS = {
    "gemma3_text": {**GEMMA3, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]},
    "gemma4_text": {**GEMMA4, **SHARING, "vocab_size_per_layer_input": 4096},
}
OWN = {"vocab_size": 4096, "hidden_size": 96, "intermediate_size": 104, "num_attention_heads": 4, "eos_token_id": 1}
DRAFT = DFlashConfig(96, 128, 2, 4, 2, 24, Rotary(24, 1e4), (ALL_ROWS,) * 2, (0, 2), 8, 5)


def answer_all(server: Running, together: int) -> tuple[list[object], int]:
    """Return the answers to all prompts, `together` of them at the same time, and how many prompts were restored."""

    def ask(prompt: list[int]) -> dict:
        return server.complete(prompt, max_tokens=6, temperature=0, logprobs=2).json()

    with ThreadPoolExecutor(together) as pool:
        found = list(pool.map(ask, PROMPTS))
    return [one["choices"] for one in found], sum(one["rekindle"]["restored_tokens"] > 0 for one in found)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("model_type", MODELS)
def test_three_hundred_prompts_are_answered_alike_wherever_their_rows_come_from(
    model_type: str, tmp_path: Path
) -> None:
    folder, draft = tmp_path / "model", tmp_path / "draft"
    folder.mkdir()
    fields = MODELS[model_type] | OWN | {"num_hidden_layers": len(MODELS[model_type]["layer_types"])}
    save_model(folder, model_type, **fields)
    save_draft(draft, DRAFT, random_tensors(DRAFT), num_target_layers=fields["num_hidden_layers"], vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.FOLDER / name, folder)
    words = (str(folder), "--kv-cache-dir", str(tmp_path / "kv"), "--max-ctx", "1024", "--slots", "4", "--paranoid")
    words = (*words, "--kv-cache-min-tokens", "64")
    with serving(*words) as server:
        cold, restored = answer_all(server, 1)
        assert restored == 0
        found = {"host": answer_all(server, 1), "batched by four": answer_all(server, 4)}
        again = [server.complete(PROMPTS[-1], max_tokens=6, temperature=0, logprobs=2).json() for _ in range(2)]
        assert again[1]["choices"] == cold[-1], "from the slot"
        written(server)
        kill(server)
    with serving(*words) as server:
        found["disk"] = answer_all(server, 1)
        kill(server)
    with serving(*words, "--draft", str(draft), trusting=True) as server:
        found["disk, with a draft"] = answer_all(server, 1)
        found["batched by four, with a draft"] = answer_all(server, 4)
        assert server.stop() == 0
    for name, (said, restored) in found.items():
        assert sum(one != other for one, other in zip(cold, said, strict=True)) == 0, name
        assert restored, f"{name}: no prompt was restored"
