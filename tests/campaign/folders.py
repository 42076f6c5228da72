"""Model folders from outside: whatever is in their files, they are read or refused in one line."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.safetensors_folder import read_header
from adapters.checkpoint.text_files import find_template
from adapters.models import FAMILIES
from adapters.models.decoder.family import family_of
from adapters.models.drafts.dflash.config import parse_draft_config, refuse_other_formats
from adapters.models.drafts.eagle3.config import Eagle3Shapes, parse_eagle3_config
from adapters.models.families.qwen3 import parse
from adapters.text.model_text import Text
from adapters.text.template import ChatTemplate
from adapters.text.tokenizer import Tokenizer
from tests.campaign.case import Case
from tests.campaign.hostile import spoilt, spoilt_bytes, text_of
from tests.text import small


def taken(work: Callable[[], Any]) -> Any:
    """Return the result of the work; None where the checkpoint was refused, in one short line."""
    said, found = "", None
    try:
        found = work()
    except CheckpointError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 700
    return found


@contextmanager
def safetensors_heads(folder: Path) -> Iterator[Case]:
    path = folder / "m.safetensors"
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for number, shape in enumerate(([4, 8], [8], [])):
        at = 64 * number
        size = 4 * (shape[0] if shape else 1) * (shape[1] if len(shape) > 1 else 1)
        head[f"layers.{number}.w"] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}

    def check(random: Random) -> None:
        text = text_of(spoilt(head, random)).encode()
        raw = struct.pack("<Q", len(text)) + text + bytes(200)
        path.write_bytes(spoilt_bytes(raw, random) if random.random() < 0.3 else raw)
        entries = taken(lambda: read_header(path)) or {}
        for name, entry in entries.items():
            assert 0 <= entry.start <= entry.stop <= path.stat().st_size
            taken(lambda name=name, entry=entry: entry.read(name))

    yield check


@contextmanager
def configurations(_: Path) -> Iterator[Case]:
    target, hybrid = (json.loads((demo.FOLDER / at / "config.json").read_text()) for at in (".", "hybrid"))
    draft = json.loads((demo.FOLDER / "draft" / "config.json").read_text())
    selecting = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 16}
    selecting |= {"output_multiplier": 0.5, "final_logit_softcapping": 20.0, "architectures": ["DFlash2DraftModel"]}
    correcting = {"markov_rank": 32, "markov_head_type": "rnn", "sample_from_anchor": True, "is_causal": False}
    names = {
        "": (),
        "DFlash 2": ("candidate_selector.predecessor_codebook", "layers.0.mlp_conv.base_kernel"),
        "DSpark": ("markov_head.markov_w1.weight", "confidence_head.proj.weight"),
    }
    config = parse(target)
    sizes = Eagle3Shapes(64, 104, 3 * config.hidden_size, 64, 32, 80, ("d2t", "embed_tokens.weight", "lm_head.weight"))
    layer = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1}
    names_layers = {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_aux_hidden_state": True}
    eagle = {**layer, "vocab_size": config.vocab_size, "draft_vocab_size": 80, "rope_theta": 1e4, "rope_scaling": None}
    eagle |= {"eagle_config": names_layers, "transformer_layer_config": layer, "norm_before_fc": True}

    def check(random: Random) -> None:
        changed = spoilt(random.choice((target, hybrid, {"text_config": hybrid})), random)
        if isinstance(changed, dict):  # or `read_json` refuses it
            for kind in FAMILIES:
                taken(lambda kind=kind: family_of({"model_type": kind}).parse(changed))
        changed = spoilt(draft | selecting | correcting, random)
        if isinstance(changed, dict):
            taken(lambda: refuse_other_formats(changed))
            for kind in names.values():
                taken(lambda kind=kind: parse_draft_config(changed, shapes, config, kind))
        changed = spoilt(eagle, random)
        if isinstance(changed, dict):
            taken(lambda: parse_eagle3_config(changed, sizes, config))

    from adapters.models.drafts.dflash.checkpoint import DraftCheckpoint, _read_shapes  # noqa: PLC0415

    shapes = _read_shapes(DraftCheckpoint.open(demo.FOLDER / "draft", config).tensors)
    yield check


@contextmanager
def tokenizers(folder: Path) -> Iterator[Case]:
    small.write(folder)
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    whole = {name: (folder / name).read_text() for name in names if (folder / name).exists()}

    def check(random: Random) -> None:
        for file, content in whole.items():
            (folder / file).write_text(content)
        name = random.choice(names)
        text = text_of(spoilt(json.loads(whole.get(name, '{"eos_token_id": [1, 2]}')), random)).encode()
        (folder / name).write_bytes(spoilt_bytes(text, random) if random.random() < 0.2 else text)
        text_ = taken(lambda: Text.load(folder))
        if text_ is not None:
            (tokens,) = text_.tokenizer.encode_now(["Hello, world <|im_end|>"])
            text_.tokenizer.decode(tokens)
            for token in tokens[:3]:
                text_.tokenizer.token_bytes(token)

    yield check


FRAGMENTS = (
    *("{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ messages[0].role }}", "{% if m %}"),
    *("{% endif %}", "{{ range(10**9)|list }}", "{{ 'x' * 10**9 }}", "{% set n = namespace(a=1) %}", "{#", "\n"),
    *("{{ raise_exception('no') }}", "{{ ''.__class__ }}", "{{ '%999999999d' % 1 }}", "<|im_start|>", "{%", "}}"),
    *("{{ m|tojson }}", "\ud800", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "{{ 9**9**9 }}"),
    "{{ messages|map(attribute='content')|join }}",
)


@contextmanager
def chat_templates(folder: Path) -> Iterator[Case]:
    small.write(folder)
    tokenizer = Tokenizer.load(folder)
    source = find_template(folder, json.loads((folder / "tokenizer_config.json").read_text())) or "{{ messages }}"

    async def checked(text: str) -> str:
        template = ChatTemplate(text, tuple(tokenizer.controls.values()), tokenizer.variables, seconds=0.3)
        try:
            await template.check()
        except CheckpointError as error:
            return str(error)
        finally:
            await template.aclose()
        return ""

    def check(random: Random) -> None:
        count = random.randint(1, 6)
        parts = [random.choice((*FRAGMENTS, source[: random.randint(0, len(source))])) for _ in range(count)]
        assert len(anyio.run(checked, "".join(parts))) < 2200

    yield check
