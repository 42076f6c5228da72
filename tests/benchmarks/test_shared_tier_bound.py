"""The ratio that the whole shared tier could reach beside its client, from processor time."""

from __future__ import annotations

from math import inf

import pytest

from adapters.sequence_layout import RowSpec
from adapters.store.files.file_format import Layout
from benchmarks.shared_tier import BLOCK, compute_bound, make_runs, time_codec

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("rate", "client_s", "codec_s", "cores", "bound"),
    [
        (1250.0, 0.4, 0.4, 2, 1.0),  # two cores would move 2,500 MB/s
        (1250.0, 0.5, 1.5, 2, 0.8),
        (125.0, 0.5, 1.5, 2, 1.0),
        (1000.0, 0.5, 1.5, 1, 0.5),
    ],
)
def test_a_bound_is_what_cores_allow_over_the_rate_of_the_client(
    rate: float, client_s: float, codec_s: float, cores: int, bound: float
) -> None:
    assert compute_bound(rate, client_s, codec_s, cores) == pytest.approx(bound)


def test_a_codec_alone_takes_processor_time_in_both_directions() -> None:
    layout = Layout("bound", BLOCK, RowSpec(("rows",), 8, 512, "BF16"))
    encode_s, decode_s = time_codec(make_runs(layout, 2, "store"), layout, "store")
    assert 0 < encode_s < inf
    assert 0 < decode_s < inf
