"""Random checkpoints of families that the demo is none of, served: killed, started warm, drafted for; same tokens."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from adapters import demo
from adapters.models.decoder.config.rope import Rotary
from adapters.models.drafts.dflash.config import DFlashConfig
from tests.e2e.prepared import serving
from tests.e2e.server import Running
from tests.e2e.test_restart import kill, written
from tests.models.checkpoints import LLAMA3, rope, save_model
from tests.models.draft_models import FULL as ALL_ROWS
from tests.models.draft_models import random_tensors, save_draft
from tests.models.hybrids import ROPE
from tests.models.windowed import FULL, GEMMA3, GEMMA4, KEYS_AS_VALUES, SHARING, SLIDING

VOCAB, LAYERS, HIDDEN = 4096, 4, 96  # the demo's tokenizer's
PROMPT = [10 + 37 * n % 4000 for n in range(600)]
SHAPE = {"hidden_size": HIDDEN, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
LINEAR_SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
FAMILIES = {
    "llama": {**rope("llama3", **LLAMA3), "bos_token_id": 0, "eos_token_id": [1, 2]},
    "qwen2": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2, "eos_token_id": 1},
    "qwen3_moe": {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "eos_token_id": 1},
    "qwen3_next": {
        **LINEAR_SIZES,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 32,
        "head_dim": 32,
        "rope_parameters": ROPE,
        "eos_token_id": 1,
    },
    "gemma3_text": {**GEMMA3, "layer_types": [SLIDING, FULL, SLIDING, SLIDING], "eos_token_id": [1, 2]},
    "gemma4_text": {
        **GEMMA4,
        **KEYS_AS_VALUES,
        **SHARING,
        "num_hidden_layers": LAYERS,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 1,
        "eos_token_id": [1, 2],
    },
    "qwen3_5_text": {**LINEAR_SIZES, "head_dim": 32, "rope_parameters": ROPE, "eos_token_id": [1, 2]},
}
# By default one with windows is tried. The others are long: other tests kill the demo, which is dense, and the hybrid
# demo, which is a qwen3_5. Experts keep no rows, and `tests/engine/loading/test_cpu_experts.py` starts a model of them
# again.
USUAL = ("gemma4_text",)
DRAFT = DFlashConfig(HIDDEN, 128, 2, 4, 2, 24, Rotary(24, 1e4), (ALL_ROWS,) * 2, (0, 2), 8, 5)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in USUAL else pytest.mark.long) for name in FAMILIES],
)
def model(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    own = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS, "head_dim": HIDDEN // 4}
    save_model(folder, request.param, **SHAPE | own | FAMILIES[request.param])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.FOLDER / name, folder)
    return folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    save_draft(folder, DRAFT, random_tensors(DRAFT), num_target_layers=LAYERS, vocab_size=VOCAB)
    return folder


def answers(server: Running) -> tuple[list[object], Sequence[dict]]:
    """To a greedy request, a sampled one and one that goes on from another place of the prompt."""
    asked = [
        (PROMPT, {"temperature": 0, "logprobs": 2}),
        (PROMPT, {"temperature": 0.9, "seed": 4}),
        ([*PROMPT[:400], 9, 8, 7], {"temperature": 0.7, "seed": 5}),
    ]
    found = [server.complete(prompt, max_tokens=24, **more).json() for prompt, more in asked]
    return [one["choices"][0] for one in found], [one["rekindle"] for one in found]


@pytest.mark.timeout(300)
def test_a_killed_server_of_any_family_starts_warm_and_says_the_same_with_a_draft_and_without(
    model: Path, draft: Path, tmp_path: Path
) -> None:
    words = (str(model), "--kv-cache-dir", str(tmp_path), "--paranoid", "--max-ctx", "1024")
    with serving(*words) as server:
        cold, how = answers(server)
        assert how[0]["restored_tokens"] == 0
        props = server.client.get("/props").json()
        assert props["numerics"]["shapes"] == "buckets"
        assert props["settings"]["max_copied"], "earlier text is copied where no draft is given"
        written(server)
        kill(server)
    with serving(*words, "--draft", str(draft), "--ddtree", trusting=True) as server:
        warm, how = answers(server)
        assert warm == cold
        assert (how[0]["tier"], how[0]["restored_tokens"] >= len(PROMPT) - 64) == ("disk", True)
        whys = [one["speculation"]["why"] for one in how]
        assert whys[0] != "no_draft"
        assert all(whys) or not model.name.startswith(("qwen3_5", "qwen3_next")), "at least that there were no trees"
        assert server.stop() == 0
