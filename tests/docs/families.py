"""The table of families in docs/MODELS.md, from the code: `python -m tests.docs.families` writes it anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from adapters.models import ARCHITECTURES, FAMILIES
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.family import Family, family_of
from adapters.models.decoder.layer_index import find_tree_obstacle
from adapters.models.decoder.layers.feed_forward import cut_up
from adapters.models.families.gemma4 import Gemma4Config
from adapters.text.answer.answer_parser import CALL_FORMS, REASONING
from tests.models.checkpoints import VARIANTS, make_config
from tests.models.hybrids import HYBRIDS, SPARSE
from tests.models.windowed import WINDOWED

PAGE = Path(__file__).parents[2] / "docs" / "MODELS.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
YES, NO = "yes", "no"
DTYPE = torch.bfloat16
# The forms of calls and the tags of reasoning in the templates that are published with a family.
PUBLISHED: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama": (("llama3-json", "pythonic"), ()),
    "qwen2": (("hermes",), ()),
    "mimo": (("hermes",), ("think",)),
    "qwen3": (("hermes",), ("think",)),
    "qwen3_moe": (("hermes", "qwen-xml"), ("think",)),
    "qwen3_5": (("qwen-xml",), ("think",)),
    "qwen3_5_moe": (("qwen-xml",), ("think",)),
    "qwen3_next": (("hermes", "qwen-xml"), ("think",)),
    "gemma3": ((), ()),
    "gemma4": (("gemma4",), ("gemma4",)),
    "mistral": (("mistral", "mistral-json"), ("mistral",)),
    "seed_oss": (("seed-xml",), ("seed",)),
    "glm4_moe": (("glm-xml",), ("think",)),
    "minimax_m2": (("minimax-xml",), ("think",)),
    "gpt_oss": (("harmony",), ("harmony",)),
    "laguna": (("glm-xml",), ("think",)),
    "deepseek_v2": ((), ()),
    "deepseek_v3": ((), ("think",)),
    "glm4_moe_lite": (("glm-xml",), ("think",)),
    "mistral4": (("mistral",), ("mistral",)),
}


def read_configs() -> dict[str, list[DenseConfig]]:
    """Return the configurations of the checkpoints that tests try each family with."""
    hybrids = {name: ("qwen3_5_text", settings) for name, settings in HYBRIDS.items()}
    found: dict[str, list[DenseConfig]] = {}
    for model_type, settings in (VARIANTS | hybrids | SPARSE | WINDOWED).values():
        shapes = {name: value for name, value in settings.items() if name not in {"seed", "shard_size", "tokenizer"}}
        raw = json.loads(make_config(model_type, **shapes).to_json_string()) | {"model_type": model_type}
        family = family_of(raw)
        config = family.parse(raw)
        assert isinstance(config, DenseConfig)
        found.setdefault(family.model_type, []).append(config)
    return found


def say(capable: bool | list[bool]) -> str:
    """Return what a cell says. A list has an answer for each of several models."""
    answers = capable if isinstance(capable, list) else [capable]
    return YES if all(answers) else "some" if any(answers) else NO


def write_table() -> str:
    """Return the table, one row for each family."""
    configs = read_configs()
    by_type: dict[str, tuple[Family, list[str]]] = {}
    for model_type in FAMILIES:
        family = family_of({"model_type": model_type})
        by_type.setdefault(family.model_type, (family, []))[1].append(model_type)
    columns: Mapping[str, Callable[[Family, list[str], list[DenseConfig]], str]] = {
        "family": lambda _, types, __: ", ".join(f"`{one}`" for one in types),
        "GGUF": lambda _, types, __: (
            ", ".join(f"`{name}`" for name, served in ARCHITECTURES.items() if {*served} & {*types}) or NO
        ),
        "quantised": lambda family, _, __: YES if family.cut_up is cut_up else "MXFP4",
        # Whatever later layers read crosses a cut, so every model may be cut behind any layer.
        "split": lambda _, __, own: say([one.find_crossing(1, DTYPE, DTYPE).width > 0 for one in own]),
        "DFlash": lambda family, _, __: say(family.model_type in PUBLISHED),
        "trees": lambda _, __, own: say([can_have_trees(one) for one in own]),
        "own draft": lambda family, _, own: name_own_draft(family, own),
        "scores prompts": lambda _, __, own: say([one.can_score_prompts for one in own]),
        "calls": lambda family, _, __: ", ".join(f"`{name}`" for name in PUBLISHED[family.model_type][0]) or NO,
        "reasoning": lambda family, _, __: ", ".join(f"`{name}`" for name in PUBLISHED[family.model_type][1]) or NO,
    }
    rows = [list(columns), ["---"] * len(columns)]
    for name, (family, types) in by_type.items():
        rows.append([write(family, types, configs[name]) for write in columns.values()])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def name_own_draft(family: Family, configs: Sequence[DenseConfig]) -> str:
    """Return the kind of draft that is published with the models of a family, besides DFlash drafts."""
    if family.head_shape is not None:
        return "`mtp`"
    return "assistant" if all(isinstance(one, Gemma4Config) for one in configs) else NO


def can_have_trees(config: DenseConfig) -> bool:
    """Can one shard of all layers verify trees? Recurrent layers cannot."""
    layers = range(config.num_layers)
    return not any(map(config.recurrent, layers)) and not find_tree_obstacle(config, layers)


def check_names() -> None:
    """Check that each name of a form is one that the parsers know."""
    for forms, tags in PUBLISHED.values():
        assert set(forms) <= set(CALL_FORMS)
        assert set(tags) - {"harmony"} <= set(REASONING)


def write_page(page: str) -> str:
    """Return the page with the table of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{write_table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(write_page(PAGE.read_text()))
