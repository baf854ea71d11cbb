"""The CUDA sources compiled for every supported GPU: registers, and the memory operations that matter."""

import re
from functools import cache
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from caraserve.cpu.sampling import SLOT_SAMPLING
from caraserve.gpu.driver.launch import wait_word
from caraserve.gpu.kernels import bgmv_work, cuda_launch, cuda_sources
from caraserve.gpu.kernels.cuda_sources import Unit
from caraserve.gpu.kernels.paged_cache import TokenTables
from caraserve.gpu.kernels.sampling import MaskedRows, Outputs, SamplerState, sample, score
from caraserve.model.dtype import Dtype
from tests.gpu import cubin
from tests.gpu.compiled_units import compiled

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100")
REGISTERS_OF_AN_SM = 1 << 16
SHARED_OF_AN_SM = {"sm_80": 164 << 10, "sm_86": 100 << 10, "sm_89": 100 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}
READ = ("sm_80", "sm_90")  # their instructions are checked; architectures between have those of one of them
OF_ACTIVATIONS = ("bgmv", "handoff", "sampling")
# One dtype shows whether an architecture's registers are enough: a dtype changes no more than how x is read and y
# written, which one architecture shows. A unit takes up to 5 s, so these alone are compiled at every change: the oldest
# architecture and the first with the newest instructions that the kernels use, in two dtypes.
ALWAYS = {(Dtype.F32, "sm_80"), (Dtype.BF16, "sm_90")}
UNITS = [
    *(Unit(source, Dtype.BF16, arch) for source in OF_ACTIVATIONS for arch in ARCHES),
    *(Unit(source, *other) for source in OF_ACTIVATIONS for other in ((Dtype.F32, "sm_80"), (Dtype.F16, "sm_90"))),
    *(Unit("words", Dtype.F32, arch) for arch in ARCHES),
]
BGMV, HANDOFF, SAMPLING = ([unit for unit in UNITS if unit.source == source] for source in OF_ACTIVATIONS)


def marked(units: list[Unit]) -> list[Any]:
    """Returns units as parameters; those that are like another one are only compiled when kernels change."""
    slow = [unit for unit in units if unit.source in OF_ACTIVATIONS and (unit.activation, unit.arch) not in ALWAYS]
    slow += [unit for unit in units if unit == Unit("sampling", Dtype.F32, "sm_80")]  # 9 s
    return [pytest.param(unit, marks=pytest.mark.slow) if unit in slow else unit for unit in units]


def named(unit: Unit) -> str:
    return f"{unit.source}-{unit.activation.name}-{unit.arch}"


@pytest.mark.parametrize("unit", marked(UNITS), ids=named)
def test_no_kernel_spills(unit: Unit) -> None:
    found = cubin.kernels(compiled(unit).cubin)
    assert set(found) == set(cuda_sources.kernels(unit.source))
    assert {name: kernel.frame_bytes for name, kernel in found.items()} == dict.fromkeys(found, 0)


@pytest.mark.parametrize("unit", marked(BGMV), ids=named)
def test_the_grids_blocks_fit_each_multiprocessor(unit: Unit) -> None:
    for kernel in cubin.kernels(compiled(unit).cubin).values():
        registers = (kernel.registers + 7) // 8 * 8 * bgmv_work.THREADS  # allocated in units of eight
        assert cuda_launch.BLOCKS_PER_SM * registers <= REGISTERS_OF_AN_SM
        assert cuda_launch.BLOCKS_PER_SM * (kernel.shared_bytes + 1024) <= SHARED_OF_AN_SM[unit.arch]


@cache
def instructions(code: bytes) -> dict[str, list[str]]:
    return cubin.instructions(code)


@pytest.mark.parametrize("unit", marked([unit for unit in BGMV if unit.arch in READ]), ids=named)
def test_weights_are_read_in_wide_loads_that_bypass_l1(unit: Unit) -> None:
    """Eight loads in flight for each of the three weight dtypes, none of them narrower."""
    for name, code in instructions(compiled(unit).cubin).items():
        streamed = [op for op in code if op.startswith("LDG") and ".NA" in op]
        assert len(streamed) >= 3 * 8, name
        assert all(".128" in op for op in streamed)
        used = [op for op in code if op in streamed or op.startswith(("FFMA", "LDS", "BAR"))]
        runs = [len(list(run)) for is_load, run in groupby(used, lambda op: ".NA" in op) if is_load]
        assert min(runs) >= 8, name
        assert not [op for op in code if op.startswith(("ATOM", "RED", "LDL", "STL"))], name


def reads(ptx: str, kernel: str, pointer: str) -> str:
    """Returns a letter for each instruction of interest of a kernel, in order: `w` reads weights, `.` waits for the
    kernel before it, `p` reads memory at addresses made from the parameter `pointer`."""
    names = [declared.split()[-1].lstrip("*") for declared in cuda_sources.kernels("bgmv")[kernel]]
    body = ptx.partition(f".entry {kernel}(")[2].partition("\n}")[0]
    lines = re.findall(r"^\s+(?:@\S+ )?([a-z][\w.:]+)\s+([^;]*);|(griddepcontrol\.wait);", body, re.MULTILINE)
    made, found = {f"{kernel}_param_{names.index(pointer)}"}, ""
    for _ in range(2):  # addresses that a loop makes from its last ones, too
        found = ""
        for operation, operands, waits in lines:
            target, *sources = re.findall(r"[%\w]+", operands) or [""]
            of_pointer = not made.isdisjoint(sources)
            if waits or operation.startswith("ld.global"):
                found += "." if waits else "w" if "no_allocate" in operation else "p" if of_pointer else ""
            elif of_pointer and not operation.startswith("st."):
                made.add(target)
    return found


@pytest.mark.parametrize("unit", marked(BGMV), ids=named)
def test_expand_waits_for_shrink_after_it_has_asked_for_weights_and_before_it_reads_planes(unit: Unit) -> None:
    """For each of the three weight dtypes; blocks without items wait at the end."""
    waits = int(unit.arch.removeprefix("sm_")) >= 90
    pattern = r"(w{8}\.p+){3}\." if waits else r"(w{8}p+){3}"
    code = instructions(compiled(unit).cubin)
    for name in ("bgmv_expand", "bgmv_expand_apart"):
        assert re.fullmatch(pattern, reads(compiled(unit).ptx, name, "part")), name
        asked = "".join("w" if ".NA" in op else "." if op == "ACQBULK" else "g" for op in code[name] if is_read(op))
        assert re.fullmatch(r"(g+w{8}\.){3}g+\." if waits else r"(g+w{8}){3}g+", asked), name
    admits = [at for at, op in enumerate(code["bgmv_shrink"]) if op == "PREEXIT" or ".NA" in op]
    assert (code["bgmv_shrink"][admits[0]] == "PREEXIT") == waits


def is_read(op: str) -> bool:
    return op.startswith("LDG") or op == "ACQBULK"


@pytest.mark.parametrize("unit", marked(SAMPLING), ids=named)
def test_a_multiprocessor_holds_a_sampling_block_of_1024_threads(unit: Unit) -> None:
    for kernel in cubin.kernels(compiled(unit).cubin).values():
        assert kernel.registers <= REGISTERS_OF_AN_SM // 1024
        assert kernel.shared_bytes <= 48 << 10  # more must be asked for at the launch


@pytest.mark.parametrize("unit", marked([unit for unit in SAMPLING if unit.arch in READ]), ids=named)
def test_sampling_reads_rows_in_vectors_and_counts_in_shared_memory(unit: Unit) -> None:
    code = instructions(compiled(unit).cubin)
    for name, width in (("sample_tokens", ".128"), ("score_tokens", ".128" if unit.activation is Dtype.F32 else ".64")):
        wide = [op for op in code[name] if op.startswith("LDG.E") and op.endswith(width)]
        assert len(wide) >= 2 + 4, name  # in flight in passes that compute more, and less
    counted = [op for op in code["sample_tokens"] if op.startswith("ATOMS")]
    assert not [op for op in counted if "CAS" in op]  # a loop
    assert counted


@pytest.mark.parametrize("unit", marked([unit for unit in SAMPLING if unit.arch in READ]), ids=named)
def test_penalties_and_temperatures_divide_as_the_cpu_does(unit: Unit) -> None:
    """A quotient that is off in the last bit may choose another token."""
    quotients = set(re.findall(r"\b(?:div|rcp)\.[\w.]*f32", compiled(unit).ptx))
    assert quotients == {"div.rn.f32", "rcp.rn.f32"}


@pytest.mark.parametrize("unit", marked([unit for unit in HANDOFF if unit.arch in READ]), ids=named)
def test_x_is_visible_in_host_memory_before_workers_are_asked(unit: Unit) -> None:
    """Each block: copy, system-wide fence, count. The last block: slices, fence, flags and requests with system
    scope."""
    code = instructions(compiled(unit).cubin)["handoff_publish"]
    fences = [at for at, op in enumerate(code) if op.startswith("MEMBAR") and op.endswith(".SYS")]
    copies = [at for at, op in enumerate(code) if op == "ST.E.128"]  # to an address from the work order
    (count,) = (at for at, op in enumerate(code) if op.startswith("ATOMG"))
    flags = [at for at, op in enumerate(code) if op.startswith("ST") and "STRONG.SYS" in op]
    assert copies
    assert [at for at in fences if max(copies) < at < count]
    assert len(flags) == 3  # x_flag, request, y_flag
    assert compiled(unit).ptx.count("st.release.sys.global.s64") == len(flags) + 1  # the wait's, when it leaves
    for before, flag in zip([count, *flags], flags, strict=False):
        assert [at for at in fences if before < at < flag]


@pytest.mark.parametrize("unit", marked([unit for unit in HANDOFF if unit.arch in READ]), ids=named)
def test_waiting_for_workers_reads_memory_and_not_a_cache(unit: Unit) -> None:
    code = instructions(compiled(unit).cubin)
    polled = [op for op in code["handoff_wait"] if op.startswith("LD") and "STRONG.SYS" in op]
    assert len(polled) >= 3  # status, arrived, done
    assert "NANOSLEEP" in {op.split(".")[0] for op in code["handoff_wait"]}
    assert [op for op in code["handoff_add"] if op.startswith("LD") and ".128" in op and "STRONG.SYS" in op]


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit.source == "words" and unit.arch in READ], ids=named)
def test_waiting_for_a_word_reads_memory_and_sleeps_between_reads(unit: Unit) -> None:
    code = instructions(compiled(unit).cubin)["wait_word"]
    assert [op for op in code if op.startswith("LD") and "STRONG.SYS" in op]
    assert "NANOSLEEP" in {op.split(".")[0] for op in code}


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit.source == "words" and unit.arch in READ], ids=named)
def test_small_arrays_are_read_from_memory_and_not_a_cache(unit: Unit) -> None:
    """Their places in the ring are reused."""
    code = instructions(compiled(unit).cubin)["scatter_words"]
    loads = [op for op in code if op.startswith("LD") and not op.startswith("LDC")]
    assert loads
    assert all("STRONG.SYS" in op for op in loads)
    assert loads[-1].startswith("LDG.E.128")  # of the array, after those of its description


def test_every_source_is_compiled_for_every_architecture_and_with_every_dtype() -> None:
    assert {(unit.source, unit.arch) for unit in UNITS} == set(product(cuda_sources.SOURCES, ARCHES))
    with_dtypes = {(unit.source, unit.activation) for unit in UNITS if unit.source != "words"}
    assert with_dtypes == set(product(set(cuda_sources.SOURCES) - {"words"}, Dtype))


def test_an_invalid_source_raises_with_the_compilers_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_sources, "sources", lambda name: {"bad.cu": "__global__ void f() { undeclared(); }"})
    with pytest.raises(cuda_sources.CompilationFailed, match=r'bad\.cu.*\n*.*"undeclared" is undefined'):
        cuda_sources.compiled(Unit("bad", Dtype.F32, "sm_80"))


def test_a_digest_changes_with_everything_that_the_code_depends_on() -> None:
    units = [Unit("bgmv", Dtype.F32, "sm_80"), Unit("bgmv", Dtype.BF16, "sm_80"), Unit("bgmv", Dtype.F32, "sm_90")]
    digests = {
        unit.digest(version) for unit in (*units, Unit("words", Dtype.F32, "sm_80")) for version in ("12.9", "13.0")
    }
    assert len(digests) == 8


def test_a_second_start_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit("words", Dtype.F32, "sm_90")
    first = cuda_sources.cubin_file(unit, tmp_path / "new")
    assert set(cubin.kernels(first.read_bytes())) == {"wait_word", "scatter_words"}
    monkeypatch.delattr(cuda_sources, "compiled")
    assert cuda_sources.cubin_file(unit, tmp_path / "new") == first
    assert list((tmp_path / "new").iterdir()) == [first]


ROWS, PART = cuda_launch.ActivationRows(64, 16, 16), cuda_launch.ShrinkBuffer(0, 1, 1, 8)
TABLES, ITEMS = cuda_launch.WeightTables(0, 0, 0, 0, 0, 0, 1), cuda_launch.WorkList(0, 0, 0)
ONE = cuda_launch.Projections((0,), (16,))
EMPTY = torch.empty(2, 8, dtype=torch.int32)
OUTPUTS, MASKED = Outputs(*[EMPTY] * 8), MaskedRows(EMPTY[0], EMPTY)
STATE = SamplerState(torch.empty(2, SLOT_SAMPLING.itemsize, dtype=torch.uint8), EMPTY, EMPTY, EMPTY)
EVERY_LAUNCH = (
    cuda_launch.shrink(1, TABLES, ITEMS, ROWS, PART),
    cuda_launch.expand(1, TABLES, ITEMS, PART, ROWS, ONE),
    cuda_launch.expand_apart(1, TABLES, ITEMS, PART, cuda_launch.ActivationRows(64, 64, 64), ONE),
    cuda_launch.publish(1, 0, ROWS, 16, 0, 0, 0),
    cuda_launch.wait(0, 0, 0),
    cuda_launch.add(1, 0, 0, ROWS, ONE, 64, (0,)),
    wait_word(0, 0),
    cuda_launch.scatter_words(0, 1),
    sample(EMPTY, OUTPUTS, TokenTables(EMPTY, EMPTY), STATE),
    sample(EMPTY, OUTPUTS, TokenTables(EMPTY, EMPTY), STATE, MASKED),
    score(EMPTY, OUTPUTS),
)


@pytest.mark.parametrize("launch", EVERY_LAUNCH, ids=lambda launch: launch.kernel)
def test_arguments_have_the_widths_in_the_source(launch: cuda_launch.Launch) -> None:
    widths = {"int": np.int32, "i64": np.int64, "u32": np.uint32}
    declared = cuda_sources.kernels(launch.source)[launch.kernel]
    expected = [np.uint64 if "*" in text else widths[text.split()[0]] for text in declared]
    assert [type(argument) for argument in launch.arguments] == expected


def test_every_kernel_has_a_launch() -> None:
    kernels = {name for source in cuda_sources.SOURCES for name in cuda_sources.kernels(source)}
    assert {launch.kernel for launch in EVERY_LAUNCH} == kernels
