"""Products of our own as these sources make them."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf  # noqa: F401 - before pytest takes the folder `gguf` of tests for it
import pytest

import hatch_build
from adapters.models.kernels.cpu.native import native_library


@pytest.fixture(scope="session")
def compiled_folder(tmp_path_factory) -> Path:
    """Sources, and what the build hook makes of them: the tree's own, if it was made of these sources by this hook."""
    hook = Path(hatch_build.__file__)
    tree = hook.parent / hatch_build.FOLDER
    if (
        native_library.open_library(tree)[0] is not None
        and (tree / hatch_build.FILE).stat().st_mtime > hook.stat().st_mtime
    ):
        return tree
    root = tmp_path_factory.mktemp("tree")
    shutil.copytree(tree, root / hatch_build.FOLDER, ignore=shutil.ignore_patterns("*.so"))
    if hatch_build.compiled(root) is None:
        pytest.skip("no C compiler")
    return root / hatch_build.FOLDER


@pytest.fixture(scope="session")
def native_code(compiled_folder) -> native_library.NativeLibrary:
    found, why = native_library.open_library(compiled_folder)
    assert found is not None, why
    return found
