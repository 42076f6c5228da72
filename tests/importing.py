"""The environment in which a process that a test starts finds this tree, and all that the test's own
environment names.
"""

from __future__ import annotations

import os
from pathlib import Path


def importing(root: Path) -> dict[str, str]:
    """For its environment: this tree first."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(root), *([before] if before else [])])}
