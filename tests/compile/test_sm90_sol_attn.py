"""The SM90 Sol-Attn kernel compiles for sm_90a without a GPU, into the code it is meant to be."""

import ast
import itertools
import re
import struct
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import triton

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from hopper_sol.kernels import jit
from hopper_sol.kernels.jit.cute import CuteToolchain
from hopper_sol.kernels.sol_attn import sm90_compile, sm90_fwd, sm90_kernel
from hopper_sol.kernels.sol_attn.sm90_variant import CONSUMERS, SHARED_BYTES, Variant

# What the DSL says of its own names and of unrolled loops.
pytestmark = pytest.mark.filterwarnings("ignore")

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
REGISTERS = 65_536  # of a multiprocessor
CUDA_MACHINE = 190  # e_machine of a cubin
LOCAL_MEMORY = r"\b(STL|LDL)\b"
TRY_WAIT = r"SYNCS\.PHASECHK\S*TRYWAIT"
SOURCES = ("words", "scores", "all")
FLAGS = ("with_lse", "ordered", "with_offset")
# What ptxas puts aside, by (precision, source). "all" has two tiles of scores at a time: four numbers,
# each written and read at most once a pair.
STACK_BYTES = {("fp8", "all"): 16}

# Of the 48 combinations, those in which every pair of settings of one precision comes up.
VARIANTS = [
    Variant("fp8", "words"),
    Variant("fp8", "words", with_lse=True, ordered=True),
    Variant("fp8", "words", ordered=True, with_offset=True),
    Variant("fp8", "all", with_lse=True, with_offset=True),
    Variant("fp8", "all", ordered=True),
    Variant("fp8", "words", with_lse=True, with_offset=True),
    Variant("fp8", "scores"),
    Variant("fp8", "scores", with_lse=True, ordered=True, with_offset=True),
    Variant("bf16", "words"),
    Variant("bf16", "words", with_lse=True, ordered=True),
    Variant("bf16", "all", ordered=True),
    Variant("bf16", "all", with_lse=True),
    Variant("bf16", "scores"),
    Variant("bf16", "scores", with_lse=True, ordered=True),
]
# Column sums of 16 columns a thread over the eight lanes that share them, by halving.
ROUTE_SHUFFLES = 8 + 4 + 2


@dataclass
class Machine:
    """Facts of one compiled variant.

    Attributes:
        sass: machine code as text.
        registers: a thread has at entry.
        stack: bytes of a thread.
        shared: bytes of dynamic shared memory.
    """

    sass: str
    registers: int
    stack: int
    shared: int

    def instructions(self):
        """(address, text) of every instruction, in order."""
        found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", self.sass, re.MULTILINE)
        return [(int(address, 16), text.strip()) for address, text in found]

    def count(self, pattern):
        return sum(bool(re.search(pattern, text)) for _, text in self.instructions())

    def product_loops(self):
        """Instructions of the innermost loops that hold tensor products, in order."""
        instructions = self.instructions()
        spans = []
        for address, text in instructions:
            branch = re.search(r"\bBRA (?:!?U?P\d, )?0x([0-9a-f]+)", text)
            if branch and int(branch[1], 16) < address:
                spans.append((int(branch[1], 16), address))
        bodies = {
            span: [text for at, text in instructions if span[0] <= at <= span[1]] for span in spans
        }
        bodies = {span: body for span, body in bodies.items() if places(body, "GMMA")}
        inner = [
            (first, last)
            for first, last in bodies
            if not any(first <= a and b <= last for a, b in bodies if (a, b) != (first, last))
        ]
        return [bodies[span] for span in sorted(inner)]


def places(body, pattern):
    return [place for place, text in enumerate(body) if re.search(pattern, text)]


def cubin_in(data):
    """The machine code inside of a host object."""
    found = []
    for match in re.finditer(rb"\x7fELF", data):
        at = match.start()
        if struct.unpack_from("<H", data, at + 18)[0] == CUDA_MACHINE:
            segments, sections = struct.unpack_from("<QQ", data, at + 32)
            size, count, section_size, section_count = struct.unpack_from("<HHHH", data, at + 54)
            end = max(segments + size * count, sections + section_size * section_count)
            found.append(data[at : at + end])
    (cubin,) = found
    return cubin


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Compiles a variant as a first call does: ``Machine``."""

    def compile_it(variant):
        made = []

        def remember(*arguments, **named):
            made.append(sm90_kernel.SolAttnSm90(*arguments, **named))
            return made[-1]

        monkeypatch.setattr(sm90_compile, "SolAttnSm90", remember)

        def build(options):
            return sm90_compile.compile_variant(variant, options)

        kernel = jit.Kernel(variant.name, build, sm90_fwd.sources(), repr(variant))
        path = tmp_path / "kernel.cubin"
        path.write_bytes(cubin_in(CuteToolchain().compile(kernel)))

        def dump(option):
            command = [str(CUOBJDUMP), option, str(path)]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = re.search(r"REG:(\d+) STACK:(\d+)", dump("-res-usage"))
        (instance,) = made
        shared = instance.Storage.size_in_bytes()
        return Machine(dump("-sass"), int(usage[1]), int(usage[2]), shared)

    return compile_it


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_variant(compiled, variant):
    machine = compiled(variant)
    stack = STACK_BYTES.get((variant.precision, variant.source), 0)
    assert machine.stack <= stack
    assert machine.count(LOCAL_MEMORY) <= 3 * stack / 4  # written, and read in one or two places
    # The two of each look at a label are in ``traced`` only.
    inside = ROUTE_SHUFFLES if variant.source == "scores" else 0
    assert inside <= machine.count(r"\bSHFL\b") < 20 + inside
    assert machine.shared <= SHARED_BYTES
    check_registers(machine)
    if variant.pairs:
        check_pairs([text for _, text in machine.instructions()])
    else:
        check_loops(machine, variant)


def check_registers(machine):
    """Registers go from the producer to the consumers, and there are enough of them."""
    threads = sm90_kernel.WARPGROUP * (1 + CONSUMERS)
    assert machine.registers * threads <= REGISTERS
    producer, consumer = sm90_kernel.PRODUCER_REGISTERS, sm90_kernel.CONSUMER_REGISTERS
    assert (producer + CONSUMERS * consumer) * sm90_kernel.WARPGROUP <= REGISTERS
    # ptxas drops both, with a warning that nobody sees, if it does not know how many blocks run.
    changes = [text for _, text in machine.instructions() if "USETMAXREG" in text]
    assert len(changes) == 2
    assert re.search(rf"DEALLOC\S* 0x{producer:x}$", changes[0])
    assert re.search(rf"TRY_ALLOC\S* UP\d, 0x{consumer:x}$", changes[1])


def check_pairs(loop):
    """Two tiles at a time, and a last one alone if their number is odd: all products that there are."""
    scores = places(loop, r"\bQGMMA\.64x64x32\.F32")
    values = places(loop, r"\bQGMMA\.64x136x32\.F32")
    assert len(scores) == 2 * 4 and len(values) == 2 * 2 + 2
    assert len(places(loop, "GMMA")) == len(scores) + len(values)
    # Scores of a tile start from zero, and products with V: those of a pair make one sum.
    assert [bool(re.search(r"\bRZ\b", loop[place])) for place in scores] == [
        index % 4 == 0 for index in range(8)
    ]
    assert [bool(re.search(r"\bRZ\b", loop[place])) for place in values] == [
        index in (0, 4) for index in range(6)
    ]
    # The second tile's scores are asked for before the first's are waited for.
    waits = places(loop, r"WARPGROUP\.DEPBAR")
    assert scores[-1] < waits[0] < values[0]
    assert len(places(loop[waits[0] : values[0]], r"MUFU\.EX2")) >= 64
    # The next slot is looked at while the products of a pair run, which are added up once.
    wait = next(at for at in waits if at > values[3])
    between = loop[values[3] : wait]
    assert places(between, TRY_WAIT) and places(between, r"\bLDS\b")
    after = loop[wait : values[4]]
    assert 64 <= len(places(after, r"\bFADD\b")) < 128


def check_loops(machine, variant):
    loops = machine.product_loops()
    assert len(loops) == (1 if variant.source == "all" else 2)  # summaries, exact blocks
    opcode, other, inner = ("QGMMA", "HGMMA", 32) if variant.fp8 else ("HGMMA", "QGMMA", 16)
    assert machine.count(rf"\b{other}\b") == 0
    rows = 136 if variant.fp8 else 128  # FP8 multiplies V with 8 rows of ones below
    for loop in loops:
        assert not places(loop, LOCAL_MEMORY)
        scores = places(loop, rf"\b{opcode}\.64x64x{inner}\.F32")
        values = places(loop, rf"\b{opcode}\.64x{rows}x{inner}\.F32")
        assert len(scores) == 128 // inner and len(values) == 64 // inner
        assert len(places(loop, "GMMA")) == len(scores) + len(values)
        # Scores start from zero. So do the FP8 products with V, whose sums have few bits: they
        # are added up over the tiles in FP32, 64 a thread. Those of BF16 go on.
        assert [bool(re.search(r"\bRZ\b", loop[place])) for place in scores] == [
            place == scores[0] for place in scores
        ]
        assert [bool(re.search(r"\bRZ\b", loop[place])) for place in values] == [
            variant.fp8 and place == values[0] for place in values
        ]
        waits = places(loop, r"WARPGROUP\.DEPBAR")
        assert len(waits) == 2 and scores[-1] < waits[0] < values[0] < values[-1] < waits[1]
        # 64 x 64 probabilities of 128 threads, at least once before they are used.
        assert len(places(loop[waits[0] : values[0]], r"MUFU\.EX2")) >= 32
        if variant.fp8:
            assert len(places(loop[waits[1] :], r"\bFADD\b")) >= 64
    decisions = [check_decision(loop) for loop in loops]
    assert decisions == ([True, False] if variant.source == "scores" else [False] * len(loops))
    # Exact blocks. FP8 looks at the next tile while the products with V run; the assembler moves
    # the wait for products ahead of everything that stands in the same basic block. BF16, which has
    # few slots, waits, gives its slot back, and then looks.
    loop = loops[-1]
    wait = places(loop, r"WARPGROUP\.DEPBAR")[1]
    if variant.fp8:
        between = loop[places(loop, r"\bQGMMA\.64x136x")[-1] : wait]
        assert places(between, TRY_WAIT) and places(between, r"\bLDS\b")
    else:
        release = next(at for at in places(loop, r"SYNCS\.ARRIVE") if at > wait)
        look = next(at for at in places(loop, TRY_WAIT) if at > wait)
        assert release < look


def check_decision(loop):
    """Whether a loop decides which blocks are exact: between the scores and their exponentials, with
    one barrier of the warpgroup and a vote for each of the two words."""
    barriers = places(loop, r"\bBAR\.SYNC")
    if not barriers:
        return False
    (barrier,) = barriers
    shuffles = [at for at in places(loop, r"\bSHFL\.BFLY") if at < barrier]
    assert len(shuffles) == ROUTE_SHUFFLES
    wait, first = places(loop, r"WARPGROUP\.DEPBAR")[0], places(loop, r"MUFU\.EX2")[0]
    assert wait < shuffles[0] and barrier < first
    votes = [at for at in places(loop, r"\bVOTE") if barrier < at < first]
    assert len(votes) >= 2
    assert len([at for at in places(loop, r"\bLDS\b") if barrier < at < votes[-1]]) == 8
    return True


def test_gate_sees_spills(compiled, monkeypatch):
    """An accumulator, scores and probabilities take more than 144 registers."""
    monkeypatch.setattr(sm90_kernel, "CONSUMER_REGISTERS", 144)
    machine = compiled(Variant("fp8"))
    assert machine.stack > 0 and machine.count(LOCAL_MEMORY) > 0


def test_traced_variant(compiled):
    """Two more shuffles wherever a label is looked at, and one for an item; no other difference."""
    plain, traced = (compiled(Variant("fp8", traced=traced)) for traced in (False, True))
    shuffles = [machine.count(r"\bSHFL\b") for machine in (plain, traced)]
    assert shuffles[1] >= shuffles[0] + 2 * 3 + 1  # summaries, exact blocks first and next
    for opcode in ("GMMA", "UTMALDG", r"MUFU\.EX2"):
        assert abs(plain.count(opcode) - traced.count(opcode)) <= 1


# --- What a compiled object is kept for


def test_variants_cover_every_pair():
    for precision in ("fp8", "bf16"):
        chosen = [variant for variant in VARIANTS if variant.precision == precision]
        # The mean of V's channels is added on the FP8 path only.
        flags = FLAGS if precision == "fp8" else FLAGS[:2]
        for first, second in itertools.combinations(("source", *flags), 2):
            pairs = {(getattr(v, first), getattr(v, second)) for v in chosen}
            wanted = 2 * (len(SOURCES) if first == "source" else 2)
            assert len(pairs) == wanted, (precision, first, second)


def test_every_variant_has_a_name_of_its_own():
    every = [
        Variant(precision, source, *flags)
        for precision in ("fp8", "bf16")
        for source in SOURCES
        for flags in itertools.product((False, True), repeat=len(FLAGS))
    ]
    every += [replace(variant, traced=True) for variant in every]
    every += [replace(v, keeps_words=True) for v in every if v.source == "scores"]
    assert len({variant.name for variant in every}) == len(every) == 96 + 32
    for variant in every:
        jit.Kernel(variant.name, lambda options: None, ())  # raises for what can't name a file


def test_sources_hold_everything_that_is_imported():
    """Else an edit of the forgotten file would go on with objects compiled before it."""
    assert imported_by(Path(sm90_compile.__file__)) <= set(sm90_fwd.sources())


def imported_by(path):
    """``path``, every file of the pack that it imports, and those that kernel code imports."""
    found, wanted = set(), [path]
    while wanted:
        path = wanted.pop()
        if path in found or not path.exists():
            continue
        found.add(path)
        if not (path.name.startswith("sm90") or path.parent.name == "sm90"):
            continue  # constants and types
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                wanted.append(folder.with_suffix(".py"))
                wanted += [folder / f"{alias.name}.py" for alias in node.names]
    return found
