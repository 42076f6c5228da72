"""Cases of one decoder that look for code which no case has met, where atheris is installed (`pip install atheris`).

    python -m tests.campaign.guided journals [-max_total_time=60] [-runs=1000] [CORPUS] [FILE]

Options after the kind are libFuzzer's: a folder keeps what was found, and a file is one input again. Hypothesis draws
the case from an input, so cases are as well formed as the campaign's own. The search begins with long inputs, since one
that is too short for its case shows nothing.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["adapters", "engine", "effects"]):
    from tests.campaign.kinds import DECODERS

from hypothesis import given
from hypothesis import strategies as st

from tests.campaign.case import Watchdog

SEEDS, LENGTH = 16, 1 << 14


def main() -> None:
    kinds = {kind.name: kind for kind in DECODERS}
    if sys.argv[1:2] == [] or sys.argv[1] not in kinds:
        sys.exit(f"which decoder? one of: {', '.join(kinds)}")
    kind, guard = kinds[sys.argv[1]], Watchdog()
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder, kind.bench(Path(folder)) as case:
        once = given(st.randoms(use_true_random=False))(lambda drawn: guard(case, drawn))
        seeds = Path(folder, "guided-seeds")
        seeds.mkdir()
        for number in range(SEEDS):
            (seeds / str(number)).write_bytes(random.Random(number).randbytes(LENGTH))
        words = [f"-timeout={kind.deadline_s:.0f}", f"-max_len={LENGTH}", "-len_control=0", *sys.argv[2:]]
        if not any(Path(word).is_file() for word in words):
            words.append(str(seeds))
        atheris.Setup([sys.argv[0], *words], once.hypothesis.fuzz_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
