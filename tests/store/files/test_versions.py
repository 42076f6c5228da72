"""Files that were written by this version of the format and the one before stay what they are."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import numpy as np
import pytest

from adapters.sequence_layout import RowSpec
from adapters.store.block_keys import chain_keys, pack_tokens
from adapters.store.file_description import read_head
from adapters.store.files.expected import Expected
from adapters.store.files.file_format import Layout, Outdated, Run
from adapters.store.files.read_run import fill_target
from adapters.store.files.seekable import Damaged
from adapters.store.shared.object_pieces import ObjectPieces

LAYOUT = Layout("ab" * 16, 4, RowSpec(("layers.0.k", "layers.0.v"), 1, 8, "I8"))
TOKENS = pack_tokens(range(8))
ROOT = LAYOUT.compute_root("rows")
RUN = Run(0, ROOT, chain_keys(ROOT, TOKENS, LAYOUT.block_size), TOKENS)
ROWS = np.arange(LAYOUT.compute_size("rows", RUN.length), dtype=np.uint8)
# Both hold the run above.
VERSION_3 = base64.b85decode(
    r"""D77#BWat2W3;^U8zySaN00000dm>+7ZDn*}WMOn+Utc0Rdm?gWYiVv|Y-L|-b|N|=Ga@V^YiVv|B03^+Z+CMdEFx)SWo~q7ba^5="""
    r"""B4J`-Vqsz;EFx!eVQFq6IwCY8EFyDsVRCdLIwCM4EFy4Wa%FCGB03^AHDNF{VKOr|H(@t6F=R40WMN@3Vm3E1GB#soGG#L&EFx=V"""
    r"""c_KO@H)3NqHZwCdIWsn8GiER|V>Mx9Fg7`5H90wCV>vWoA}k_ia$#*{b0Rt-H)AnlWH@CuIc8&FIc7LCIXE;mF*Z3fI51%`VPQ05"""
    r"""B7H0(bZ={AZgV0!dm?0Xd2nSSIwDCkG9oM@b7*03Wg<FTI9)6vWMOn+UvFk+b7gdMB05_zEHg4)eJmnuVR>b8b1pD0Yd9h-B6DbA"""
    r"""aAhJoTQMv+EHg4JIW}E=EFx@Sd1Z2QE-)^3IW{aYHZWa%eIOtpARqt$000310006200093000C4000F5000I6000L7000C4Ga?F#"""
    r"""NPt)f2U=p6C>_)4CMdNp{Um?^1ONa50s{mE1_uZU3JVMk4i69!5)%{^78e*98XFuP9v>hfA|oUvCMPH<Dl054E-x@KGBY$aHa9pq"""
    r"""Iy*c)K0iP~LPJDFMn_0VN=r;lPESx#Qd3k_R##YAT3cLQUSD8gVq;`wW@l(=YHMt5Zf|gLa&vTbc6WGrdV73*et(jyxkp|qO&A#f"""
    r"""005l<008I#004~u004jh0006200027>XMH"""
)
VERSION_4 = base64.b85decode(
    r"""D77#BWat3>3jm}RzySaN00000dm>+7ZDn*}WMOn+Utc0Rdm?gWYiVv|Y-L|-b|N|=G$Je_YiVv|B03^+Z+CMdEFx)SWo~q7ba^5="""
    r"""B4J`-Vqsz;EFx!eVQFq6IwCY8EFyDsVRCdLIwCM4EFy4Wa%FCGB03^AHDNF{VKOr|H(@t6F=R40WMN@3Vm3E1GB#soGG#L&EFx=V"""
    r"""c_KO@H)3NqHZwCdIWsn8GiER|V>Mx9Fg7`5H90wCV>vWoA}k_vb!~GZIwCbTV=_1~Ff}wcF*q?cVlienF=S>nIWl8qGdW^8V=^Lr"""
    r"""EFyGoYh`Y8B075_WOR9OWg<EvNi#AcEFyDgVQ^(4I$JnhEFxrKbYWj_W@d9`baNs)TQDp$GF^QvB5YxKWpZ;aFfMC2F)TPNGcqhW"""
    r"""Hg+O9dm=eDEHO4PU44BZARr(hARqt$000310006200093000C4000F5000I6000L7000I6fvJr+bP<VyFfLdKhb*zn848;os3^5B"""
    r"""{UCq=1ONa50s{mE1_uZU3JVMk4i69!5)%{^78e*98XFuP9v>hfA|oUvCMPH<Dl054E-x@KGBY$aHa9pqIy*c)K0iP~LPJDFMn_0V"""
    r"""N=r;lPESx#Qd3k_R##YAT3cLQUSD8gVq;`wW@l(=YHMt5Zf|gLa&vTbc6WGrdV73*et%vnO&A#f004~v008I#004;q004jh00062"""
    r"""00027>XMH"""
)


def read(raw: bytes) -> np.ndarray:
    found = np.zeros_like(ROWS)
    fill_target(ObjectPieces([memoryview(raw)]), Expected(len(raw), RUN, LAYOUT), None, found.data)
    return found


def test_a_file_of_this_version_is_read() -> None:
    """It was written when the version was new. What cannot be read any more needs another version."""
    assert np.array_equal(read(VERSION_4), ROWS)


def test_rows_of_the_version_before_are_not_taken(tmp_path: Path) -> None:
    """Its journal is not read either, so its files are looked at, and removed as outdated."""
    with pytest.raises(Damaged):
        read(VERSION_3)
    (tmp_path / "file").write_bytes(VERSION_3)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        with pytest.raises(Outdated):
            read_head(descriptor, len(VERSION_3))
    finally:
        os.close(descriptor)
