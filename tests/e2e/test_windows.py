"""A model whose layers mostly have windows: a restart reads what a continuation needs, and no row more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from adapters import demo
from adapters.models.open_checkpoint import Checkpoint
from tests.e2e.prepared import serving
from tests.e2e.test_restart import kill, written
from tests.models.checkpoints import save_model
from tests.models.windowed import FULL, GEMMA4, SLIDING

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
