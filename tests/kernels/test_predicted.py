"""Predictions of the kernels' speed: machine code is read rightly, pages say what is computed."""

from __future__ import annotations

import pytest

from amp.kernels.language import INTERPRETED, triton

if triton is None or INTERPRETED:
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from docs.benchmarks import machine_code, predict_kernels
from docs.benchmarks.machine_code import Body
from docs.benchmarks.predict_kernels import PRODUCTS, Usage

# A table gives an address, from which 32 bytes for each thread are loaded and 16 stored; then a loop.
SASS = """
.text.copy_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.64 R4, desc[UR6][R2.64] ;
        /*0020*/                   S2R R0, SR_TID.X ;
        /*0030*/                   LOP3.LUT R9, R0, 0xff, RZ, 0xc0, !PT ;
        /*0040*/                   ISETP.GE.AND P0, PT, R9, R7, PT ;
        /*0050*/                   IMAD.WIDE.U32 R4, R9, 0x20, R4 ;
        /*0060*/              @!P0 LDG.E.128 R12, desc[UR6][R4.64] ;
        /*0070*/              @!P0 LDG.E.128 R16, desc[UR6][R4.64+0x10] ;
        /*0080*/                   MUFU.RCP R12, R15 ;
        /*0090*/                   FADD R16, R16, R12 ;
        /*00a0*/              @!P0 STG.E.128 desc[UR6][R4.64], R16 ;
        /*00b0*/                   MEMBAR.ALL.GPU ;
        /*00c0*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*00d0*/              @!P2 LDG.E.U16 R20, desc[UR6][R4.64+0x20] ;
        /*00e0*/              @!P2 STG.E.U16 desc[UR6][R4.64+0x20], R20 ;
        /*00f0*/              @!P3 BRA `(.L_x_1) ;
.L_x_0:
        /*00ff*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0100*/               @P0 EXIT ;
        /*0110*/                   STG.E desc[UR6][R2.64], R5 ;
        /*0120*/                   EXIT ;
.L_x_2:
        /*0130*/                   BRA `(.L_x_2);
"""

AMDGCN = """
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_branch .LBB0_0
.LBB0_0:
	s_load_dwordx2 s[4:5], s[2:3], 0x0
	v_lshlrev_b32_e32 v1, 5, v0               ; a comment, v7
	s_waitcnt lgkmcnt(0)
	buffer_load_dwordx4 v[4:7], v1, s[4:7], 0 offen
	v_add_u32_e32 v2, 16, v1
	buffer_load_dwordx4 v[8:11], v2, s[4:7], 0 offen
	s_waitcnt vmcnt(1)
	v_rcp_f32_e32 v4, v4
	s_waitcnt vmcnt(0)
	v_add_f32_e32 v8, v8, v4
	buffer_store_dwordx4 v[8:11], v1, s[4:7], 0 offen
	buffer_wbl2 sc1
	s_cbranch_scc1 .LBB0_2
.LBB0_1:                                ; %.lr.ph
	global_load_ushort v3, v[12:13], off
	global_store_short v[12:13], v3, off
	s_cbranch_vccnz .LBB0_1
.LBB0_2:
	s_cbranch_execz .LBB0_3
	global_store_dword v15, v14, s[8:9]
.LBB0_3:
	s_endpgm
"""


def test_sass_is_read() -> None:
    path = machine_code.sass(SASS)
    assert path[-1].opcode.startswith("BAR")  # past the loop, up to the first exit
    assert machine_code.body(path, threads=256, near=100, far=400) == Body(
        loaded=32 * 256,
        stored=16 * 256,
        shared=8,
        in_flight=32 * 256,
        waits=100 + 400 + 100,  # for the table, the elements and the fence
        instructions=14,
        special=1,
    )


def test_amdgcn_is_read() -> None:
    path = machine_code.amdgcn(AMDGCN)
    assert path[-1].opcode == "s_cbranch_scc1"
    assert machine_code.body(path, threads=512, near=100, far=400) == Body(
        loaded=32 * 512,
        stored=16 * 512,
        shared=8,
        in_flight=32 * 512,
        waits=100 + 400 + 100,
        instructions=7,  # without scalar ones
        special=1,
    )


def test_loads_that_wait_for_each_other_are_not_in_flight_together() -> None:
    serial = SASS.replace("LDG.E.128 R16, desc[UR6][R4.64+0x10]", "LDG.E.128 R16, desc[UR6][R14.64]")
    serial = serial.replace("S2R R0, SR_TID.X", "S2R R0, SR_TID.X ;\n /*0021*/ MOV R14, R0")
    of = machine_code.body(machine_code.sass(serial), 256, near=100, far=400)
    assert (of.loaded, of.in_flight, of.waits) == (32 * 256, 16 * 256, 1000)


@pytest.mark.parametrize(
    ("target", "registers", "shared", "programs", "limit"),
    [
        ("sm_80", 32, 0, 8, "warps"),
        ("sm_90", 64, 8192, 4, "registers"),
        ("sm_90", 65, 8192, 3, "registers"),  # registers come in eights
        ("sm_80", 16, 40 * 1024, 4, "shared memory"),
        ("gfx942", 64, 4, 4, "warps"),
        ("gfx942", 96, 4, 2, "registers"),
        ("gfx942", 32, 32 * 1024, 2, "shared memory"),
    ],
)
def test_programs_that_a_unit_holds(
    target: str, registers: int, shared: int, programs: int, limit: str
) -> None:
    usage = Usage(registers, spilled=0, shared=shared)
    assert predict_kernels.resident(PRODUCTS[target], usage) == (programs, limit)


def test_more_waiting_or_more_instructions_let_expect_less() -> None:
    product, usage = PRODUCTS["sm_90"], Usage(registers=64, spilled=0, shared=0)
    body = Body(28672, 28672, 100, 28672, waits=1000.0, instructions=500, special=0)
    found = predict_kernels.predict(product, usage, body)
    latent = predict_kernels.predict(product, usage, body._replace(waits=20000.0))
    busy = predict_kernels.predict(product, usage, body._replace(instructions=5000))
    assert (found.limit, latent.limit, busy.limit) == ("memory", "registers", "instructions")
    assert max(latent.expected, busy.expected) < found.expected < product.reached / product.peak
    # half of what is moved is loaded, so half of latency times bandwidth has to be in flight
    assert found.needed == pytest.approx(product.far * product.peak / product.units / 2)


@pytest.mark.parametrize("target", [name for name, product in PRODUCTS.items() if product.scan])
def test_the_model_gives_what_was_measured_of_copies_elsewhere(target: str) -> None:
    deviation = predict_kernels.deviation(PRODUCTS[target])
    assert deviation is not None
    assert deviation < 0.15


def rows_of_the_page() -> dict[str, dict[str, list[str]]]:
    """Return the cells of its tables by target and kernel."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in predict_kernels.ROWS.read_text().split("\n## ")[1:]:
        target, *lines = part.splitlines()
        cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
        assert cells[0] == predict_kernels.HEADER
        found[target] = {row[0]: row for row in cells[2:]}
    return found


def test_the_document_has_the_main_kernels_of_the_page() -> None:
    document = predict_kernels.DOCUMENT.read_text()
    shown = [line.strip("| ").split(" | ") for line in document.splitlines() if line.startswith("|")]
    for cells in predict_kernels.main_rows(rows_of_the_page()):
        assert cells in shown
