"""Faults are found in machine code: sums with torn halves, and registers that are written too early."""

from __future__ import annotations

from tests.models.kernels.compiled_code import find_overwritten_operands, find_torn_sums

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


def test_operands_that_are_written_before_a_wait_are_found() -> None:
    code = """
        /*1000*/                   HGMMA.64x32x16.F32.BF16 R24, R52, gdesc[UR24], R24 ;
        /*1010*/                   HGMMA.64x32x16.F32.BF16 R24, R40, gdesc[UR24], R24, gsb0 ;
        /*1020*/                   IADD3 R56, R56, R1, RZ ;
        /*1030*/                   HGMMA.64x32x16.F32.BF16 R24, R60, gdesc[UR24], R24, gsb0 ;
        /*1040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*1050*/                   LDG.E.128 R40, desc[UR24][R4.64] ;
        /*1060*/              @!P1 LDG.E.64 R62, desc[UR24][R4.64] ;
        /*1070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*1080*/                   MOV R60, R1 ;
    """
    assert find_overwritten_operands(code) == ["LDG.E.64 R62, desc[UR24][R4.64]"]
    assert len(find_overwritten_operands(code.replace("0x1 ;", "0x2 ;"))) == 2
