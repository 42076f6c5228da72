"""Models: families, their forwards, the kernels, and the probe that proves their numerics."""

from collections.abc import Mapping

# `model_type` of config.json -> the module with its FAMILY. Names only: who asks what is served need not import torch.
FAMILIES: Mapping[str, str] = {
    "llama": "adapters.models.families.llama",
    "qwen2": "adapters.models.families.qwen2",
    "mimo": "adapters.models.families.mimo",
    "qwen3": "adapters.models.families.qwen3",
    "qwen3_moe": "adapters.models.families.qwen3_moe",
    "qwen3_5": "adapters.models.families.qwen3_5",
    "qwen3_5_text": "adapters.models.families.qwen3_5",
    "qwen3_5_moe": "adapters.models.families.qwen3_5_moe",
    "qwen3_5_moe_text": "adapters.models.families.qwen3_5_moe",
    "qwen3_next": "adapters.models.families.qwen3_next",
    "gemma3": "adapters.models.families.gemma3",
    "gemma3_text": "adapters.models.families.gemma3",
    "gemma4": "adapters.models.families.gemma4",
    "gemma4_text": "adapters.models.families.gemma4",
    "mistral": "adapters.models.families.mistral",
    "mistral3": "adapters.models.families.mistral",
    "ministral3": "adapters.models.families.mistral",
    "seed_oss": "adapters.models.families.seed_oss",
    "glm4_moe": "adapters.models.families.glm4_moe",
    "minimax_m2": "adapters.models.families.minimax_m2",
    "gpt_oss": "adapters.models.families.gpt_oss",
    "laguna": "adapters.models.families.laguna",
    "deepseek_v2": "adapters.models.families.deepseek_v2",
    "deepseek_v3": "adapters.models.families.deepseek_v3",
    "glm4_moe_lite": "adapters.models.families.glm4_moe_lite",
    "mistral4": "adapters.models.families.mistral4",
}

# `model_type` -> what such models need that is not built, for a message.
MISSING: Mapping[str, str] = {
    "deepseek_v32": "attention to rows that an indexer chooses (DSA)",
    "glm_moe_dsa": "attention to rows that an indexer chooses (DSA)",
    "mimo_v2_flash": "values of another size than keys",
}

# The same for `general.architecture` of a GGUF file.
MISSING_ARCHITECTURES: Mapping[str, str] = {
    "deepseek32": MISSING["deepseek_v32"],
    "glm-dsa": MISSING["glm_moe_dsa"],
    "mimo2": MISSING["mimo_v2_flash"],
}

# `general.architecture` of a GGUF file -> each `model_type` whose files have it. The file is served as the first one,
# unless its settings name another one.
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "llama": ("llama",),
    "qwen2": ("qwen2", "mimo"),
    "qwen3": ("qwen3",),
    "qwen3moe": ("qwen3_moe",),
    "qwen35": ("qwen3_5_text",),
    "qwen35moe": ("qwen3_5_moe_text",),
    "qwen3next": ("qwen3_next",),
    "mistral3": ("ministral3",),
    "seed_oss": ("seed_oss",),
    "glm4moe": ("glm4_moe",),
    "minimax-m2": ("minimax_m2",),
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gpt-oss": ("gpt_oss",),
    "deepseek2": ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "mistral4"),
    "mistral4": ("mistral4",),
    "laguna": ("laguna",),
}
