"""Products of our own as these sources make them, whatever is installed here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import hatch_build
from adapters.models.kernels.native import compiled


@pytest.fixture(scope="session")
def compiled_folder(tmp_path_factory) -> Path:
    """Sources, and what the build hook makes of them."""
    root, tree = tmp_path_factory.mktemp("tree"), Path(hatch_build.__file__).parent
    shutil.copytree(tree / hatch_build.FOLDER, root / hatch_build.FOLDER, ignore=shutil.ignore_patterns("*.so"))
    if hatch_build.compiled(root) is None:
        pytest.skip("no C compiler")
    return root / hatch_build.FOLDER


@pytest.fixture(scope="session")
def native_code(compiled_folder) -> compiled.NativeCode:
    found, why = compiled.opened(compiled_folder)
    assert found is not None, why
    return found
