"""The GGUF files of drafts: which file is meant, and whether its tokens are those of the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.gguf.header import is_gguf, read_header
from adapters.checkpoint.gguf.metadata import Metadata
from adapters.checkpoint.gguf.types import INTEGERS, PACKINGS
from adapters.checkpoint.text_files import read_text_files

NAMES = ("dflash-draft", "eagle3")
TOKENS = "tokenizer.ggml.tokens"
DRAFT_PACKINGS = {**PACKINGS, **INTEGERS}  # a map of a reduced vocabulary has integers


def find_gguf_draft(path: Path) -> Path | None:
    """Return the GGUF file that holds a draft: the path itself, or the only one of a folder without config.json.

    Names that begin with `dflash-draft` or `eagle3` are preferred. Raises CheckpointError if there are several.
    """
    if is_gguf(path):
        return path
    if path.suffix == ".gguf":
        raise CheckpointError(f"{path}: no such file")
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    preferred = [file for file in files if file.name.startswith(NAMES)] or files
    if len(preferred) > 1:
        names = ", ".join(file.name for file in preferred[:4])
        raise CheckpointError(f"{path}: several GGUF files ({names}); accepted: the path of one of them")
    return preferred[0] if preferred else None


def check_gguf_tokens(path: Path, target: Path) -> None:
    """Raise CheckpointError if a GGUF draft has other tokens than its target. Other drafts have no tokens to compare.

    Only ids that both have are compared, because vocabularies are filled up differently.
    """
    file = find_gguf_draft(path)
    if file is None:
        return
    header = read_header(file, DRAFT_PACKINGS)
    if TOKENS not in header.fields:
        return
    known = _list_tokens(read_text_files(target).tokenizer)
    for number, token in enumerate(header.read_texts(TOKENS)):
        theirs = known.get(number, token)
        if theirs != token:
            raise CheckpointError(
                f"{file}: token {number} is {describe_value(token)}, but the target has {describe_value(theirs)}: "
                "a draft of another target"
            )


def count_gguf_tokens(metadata: Metadata) -> int | None:
    """Return the number of the draft's tokens, or None if the file does not say it."""
    tokens = metadata.header.fields.get(TOKENS)
    count = getattr(tokens, "count", None)
    return count if metadata.find_field("vocab_size") is None else metadata.read_count("vocab_size")


def _list_tokens(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the tokens of a tokenizer.json by id. Vocabularies that are lists, as few models have, are left out."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    added = tokenizer.get("added_tokens") or ()
    found = {id_: token for token, id_ in vocabulary.items()} if isinstance(vocabulary, Mapping) else {}
    return found | {token["id"]: token["content"] for token in added}
