"""A fault of the assembler is found in machine code, and not where registers were written in between."""

from __future__ import annotations

from tests.models.kernels.compiled_code import find_torn_sums

TORN = """
        /*6ab0*/                   UIADD3 UR6, UP1, UR11, 0x40, URZ ;
        /*6ac0*/                   LOP3.LUT P0, RZ, R0, 0x1, RZ, 0xc0, !PT ;
        /*6ad0*/             @!UP2 UIADD3.X UR7, UR11, -0x7fffffe0, URZ, UP1, !UPT ;
"""
WHOLE = """
        /*2d80*/                   UIADD3 UR6, UP0, UR4, 0x2, URZ ;
        /*2d90*/                   UMOV UR4, URZ ;
        /*2da0*/                   UIADD3.X UR7, UR4, 0x40000040, URZ, UP0, !UPT ;
        /*2db0*/                   UIADD3 UR8, UP1, UR6, 0x2, URZ ;
        /*2dc0*/                   UIADD3.X UR9, UR7, 0x40000040, URZ, UP1, !UPT ;
        /*2dd0*/                   UIADD3 UR8, UP1, UR5, 0x2, URZ ;
        /*2de0*/                   UIADD3.64 UR4, UR6, 0x40, URZ ;
        /*2df0*/                   UIADD3.X UR9, UR5, 0x40000040, URZ, UP1, !UPT ;
"""


def test_sums_whose_halves_come_from_one_register_are_found() -> None:
    assert find_torn_sums(TORN) == ["UIADD3.X UR7, UR11, -0x7fffffe0, URZ, UP1, !UPT"]
    assert not find_torn_sums(WHOLE)
