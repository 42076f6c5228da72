"""Small random checkpoints of the families that no demo belongs to, with a random DFlash draft of each.

`benchmarks.exactness --family NAME` measures them. They have the demo's tokenizer, so they read the demo's prompts.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from adapters import demo
from adapters.models.decoder.config.rope import Rotary
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.drafts.eagle3.config import Eagle3Config
from adapters.models.kernels.interfaces.attention_rule import AttentionMask
from tests.models.checkpoints import VARIANTS, save_model
from tests.models.draft_models import random_tensors, save_assistant, save_draft, save_own_head
from tests.models.eagle3_drafts import random_eagle3, save_eagle3
from tests.models.ggufs import packed, write_gguf
from tests.models.hybrids import HYBRIDS, SPARSE
from tests.models.windowed import WINDOWED

VOCABULARY, HIDDEN, WINDOW = 4096, 128, 200
OWN: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "eos_token_id": 1,
    # A short answer of a random model with peaked logits is one token again and again, which no fault would change.
    "initializer_range": 0.08,
}
HYBRID = "three of four, key heads shared, tied"
EVERYWHERE = "qwen3_next, experts in all layers"  # GGUF files have no layers without
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    **VARIANTS,
    **WINDOWED,
    **SPARSE,
    HYBRID: ("qwen3_5_text", HYBRIDS[HYBRID]),
    EVERYWHERE: ("qwen3_next", {**SPARSE["qwen3_next"][1], "mlp_only_layers": []}),
}
# The variants of tests that are measured, by the names that `--family` accepts.
FAMILIES = {
    "llama": "llama, yarn",
    "qwen2": "qwen2, gqa 2 to 1",
    "qwen3": "qwen3, gqa 2 to 1",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5": HYBRID,
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_next": EVERYWHERE,
    "mistral": "mistral",
    "mimo": "mimo",
    "ministral3": "ministral3, scaled queries",
    "seed_oss": "seed_oss, biased output",
    "glm4_moe": "glm4_moe, groups and norms",
    "minimax_m2": "minimax_m2",
    "gpt_oss": "gpt_oss",
    "gemma3": "gemma3",
    "gemma4": "gemma4, inputs of layers, rows shared",
    "gemma4_experts": "gemma4, experts",
    "laguna": "laguna",
    "deepseek_v2": "deepseek_v2, groups, yarn",
    "deepseek_v3": "deepseek_v3, groups, yarn",
    "glm4_moe_lite": "glm4_moe_lite",
    "mistral4": "mistral4",
}
# With compressed rows all heads share a row, and the sizes of heads are those of the variant.
COMPRESSED = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
DRAFT = DFlashConfig(
    HIDDEN, 128, 2, 4, 2, 32, Rotary(32, 1e4), (AttentionMask(), AttentionMask(causal=True)), (0, 2), 8, 5
)
EAGLE3 = Eagle3Config(HIDDEN, 128, 4, 2, 32, Rotary(32, 1e4), (0, 1, 2), HIDDEN, vocab=VOCABULARY // 2, has_map=True)


def save_family(name: str, folder: Path, drafts: str = "dflash", gguf: str = "") -> tuple[Path, Path]:
    """Write the checkpoint and its draft below `folder`, and return their paths. One name always gives one model.

    drafts: the kind of the draft: "dflash", "eagle3", "mtp" for the checkpoint's own head, or, for Gemma 4,
    "assistant".
    gguf: the checkpoint becomes a GGUF file with weights of this type. Empty: it is a folder.
    """
    model, draft = save_folders(name, folder, drafts)
    if gguf:
        kind = GGMLQuantizationType[gguf]
        model = write_gguf(folder / f"{name}.gguf", model, kind, pack=pack_weight, tokenizer="smollm")
    return model, draft


def pack_weight(name: str, weight: np.ndarray, kind: GGMLQuantizationType) -> tuple[np.ndarray, GGMLQuantizationType]:
    """Pack a weight as llama-quantize does: MXFP4 is for experts only, and rows that are no whole blocks stay F16."""
    if kind is GGMLQuantizationType.MXFP4 and not name.endswith("_exps.weight"):
        kind = GGMLQuantizationType.Q8_0
    block, _ = GGML_QUANT_SIZES[kind]
    return packed(name, weight, kind if weight.shape[-1] % block == 0 else GGMLQuantizationType.F16)


def save_folders(name: str, folder: Path, drafts: str) -> tuple[Path, Path]:
    """Write the checkpoint and its draft as folders below `folder`, and return these."""
    model_type, published = KNOWN[FAMILIES[name]]
    own = {**OWN, "num_key_value_heads": 4} if name in COMPRESSED else OWN
    settings = {
        **published,
        **{key: value for key, value in own.items() if key != "head_dim" or name not in COMPRESSED},
    }
    settings |= {own: value for own, value in {"sliding_window": WINDOW}.items() if published.get(own)}
    settings |= {own: VOCABULARY for own in ("vocab_size_per_layer_input",) if published.get(own)}
    settings |= {own: 64 for own in ("global_head_dim",) if published.get(own)}
    # Wide enough for `--quantize` to round every matrix of an expert.
    settings |= {own: 128 for own in ("moe_intermediate_size",) if published.get(own)}
    settings |= {"intermediate_size": 128} if published.get("num_local_experts") else {}
    settings.setdefault("num_hidden_layers", 3)
    model = folder / name
    draft = folder / f"{name}-draft"
    model.mkdir()
    save_model(model, model_type, **settings)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.FOLDER / file, model)
    if drafts == "mtp":
        save_own_head(model, model_type, settings)
    if drafts == "assistant":
        save_assistant(draft, settings, hidden=HIDDEN)
        return model, draft
    if drafts == "eagle3":
        save_eagle3(draft, EAGLE3, random_eagle3(EAGLE3, vocab=VOCABULARY), vocab=VOCABULARY)
        return model, draft
    layers = settings["num_hidden_layers"]
    causal_only = {"layer_types": ["full_attention", "full_attention"], "vocab_size": VOCABULARY}
    save_draft(draft, DRAFT, random_tensors(DRAFT), num_target_layers=layers, **causal_only)
    return model, draft
