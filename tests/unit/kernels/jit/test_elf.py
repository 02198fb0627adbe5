"""Small objects put together by hand, linked into memory and run."""

import ctypes
import mmap
import platform
import struct

import pytest

from hopper_sol.kernels.jit import elf
from hopper_sol.kernels.jit.elf import LinkedObject, NotLinkable

on_x86_64 = pytest.mark.skipif(
    platform.machine() != "x86_64" or not hasattr(mmap, "PROT_EXEC"), reason="runs x86-64 code"
)

CODE, CONSTANTS, VARIABLES, ZEROS, TERMINATORS, UNWIND = range(1, 7)  # section numbers
EVERY = CODE | CONSTANTS
WRITE, ALLOCATE, EXECUTE = 1, 2, 4
RET = b"\xc3"


def sizes(*, code, constants=b"", variables=b"", zeros=0, terminators=b"", unwind=b""):
    """(name, type, flags, contents, size, align) of the sections that go to memory."""
    return [
        (".ltext", 1, ALLOCATE | EXECUTE, code, len(code), 16),
        (".lrodata", 1, ALLOCATE, constants, len(constants), 64),
        (".ldata", 1, ALLOCATE | WRITE, variables, len(variables), 8),
        (".lbss", 8, ALLOCATE | WRITE, b"", zeros, 8),
        (".fini_array", 15, ALLOCATE | WRITE, terminators, len(terminators), 8),
        (".eh_frame", 0x70000001, ALLOCATE, unwind, len(unwind), 8),
    ]


def object_file(symbols, relocations, **contents):
    """A relocatable object.

    Args:
        symbols: (name, section number or 0 if undefined, value), numbered from 1.
        relocations: (section number, offset, kind, symbol number, addend).
    """
    sections = sizes(**contents)
    for number in sorted({relocation[0] for relocation in relocations}):
        table = b"".join(
            struct.pack("<QQq", offset, symbol << 32 | kind, addend)
            for where, offset, kind, symbol, addend in relocations
            if where == number
        )
        sections.append((f".rela{number}", 4, 0, table, len(table), 8, number))
    names, table = b"\0", bytes(24)
    for name, where, value in symbols:
        table += struct.pack("<IBBHQQ", len(names), 0x10, 0, where, value, 0)
        names += name.encode() + b"\0"
    text_number = len(sections) + 2
    sections.append((".symtab", 2, 0, table, len(table), 8))
    titles = b"\0"
    for section in [*sections, (".strtab",)]:
        titles += section[0].encode() + b"\0"
    sections.append((".strtab", 3, 0, names + titles, len(names + titles), 1))
    body, headers = b"", bytes(64)
    at = len(names) + 1
    for name, kind, flags, data, size, align, *info in sections:
        while len(body) % align:
            body += b"\0"
        headers += struct.pack(
            "<IIQQQQIIQQ",
            *(at, kind, flags, 0, 64 + len(body), size),
            *(text_number, info[0] if info else 0, align, 0),
        )
        at += len(name) + 1
        body += data
    start = 64 + len(body)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, start, 0, 64, 0, 0, 64, len(sections) + 1, text_number
    )
    return header + body + headers


def no_symbols(name):
    raise NotLinkable(f"nobody has {name}")


def call(linked, name="f"):
    return ctypes.CFUNCTYPE(ctypes.c_int64)(linked.address(name))()


# lea rax, [rip]; movabs rcx, imm64; add rcx, rax: imm64 is relative to byte 7.
RELATIVE = b"\x48\x8d\x05\0\0\0\0" + b"\x48\xb9" + bytes(8) + b"\x48\x01\xc1"
LOAD_RCX = b"\x48\x8b\x01"  # mov rax, [rcx]
ADD_RDX = b"\x48\xba" + bytes(8) + b"\x48\x8b\x04\x11"  # movabs rdx, imm64; mov rax, [rcx + rdx]


def number(value):
    return struct.pack("<q", value)


@on_x86_64
@pytest.mark.parametrize("section", [CONSTANTS, VARIABLES])
def test_absolute_address(section):
    """R_X86_64_64: movabs rax, address; mov rax, [rax]."""
    code = b"\x48\xb8" + bytes(8) + b"\x48\x8b\x00" + RET
    data = object_file(
        [("f", CODE, 0), ("x", section, 8)],
        [(CODE, 2, 1, 2, 8)],
        code=code,
        constants=number(11) * 2 + number(42),
        variables=number(11) * 2 + number(42),
    )
    assert call(LinkedObject(data, no_symbols)) == 42


@on_x86_64
def test_relative_address():
    """R_X86_64_PC64."""
    data = object_file(
        [("f", CODE, 0), ("x", CONSTANTS, 0)],
        [(CODE, 9, 24, 2, 2 + 8)],
        code=RELATIVE + LOAD_RCX + RET,
        constants=number(11) + number(43),
    )
    assert call(LinkedObject(data, no_symbols)) == 43


@on_x86_64
@pytest.mark.parametrize("section", [CONSTANTS, VARIABLES])
def test_offset_from_the_table(section):
    """R_X86_64_GOTPC64 and R_X86_64_GOTOFF64."""
    data = object_file(
        [("f", CODE, 0), ("_GLOBAL_OFFSET_TABLE_", 0, 0), ("x", section, 8)],
        [(CODE, 9, 29, 2, 2), (CODE, 22, 25, 3, 0)],
        code=RELATIVE + ADD_RDX + RET,
        constants=number(11) + number(44),
        variables=number(11) + number(44),
    )
    assert call(LinkedObject(data, no_symbols)) == 44


@on_x86_64
def test_functions_from_outside():
    """R_X86_64_GOT64: each has its own entry; called with a jump."""
    results = {"one": 45, "two": 46}
    called = {
        name: ctypes.CFUNCTYPE(ctypes.c_int64)(lambda value=value: value)
        for name, value in results.items()
    }
    asked = []

    def find(name):
        asked.append(name)
        return ctypes.cast(called[name], ctypes.c_void_p).value

    half = RELATIVE + ADD_RDX + b"\xff\xe0"  # jmp rax
    half = half.ljust(48, b"\x90")
    data = object_file(
        [
            *(("f", CODE, 0), ("g", CODE, 48)),
            *(("_GLOBAL_OFFSET_TABLE_", 0, 0), ("one", 0, 0), ("two", 0, 0), ("unused", 0, 0)),
        ],
        [
            *((CODE, 9, 29, 3, 2), (CODE, 22, 27, 4, 0)),
            *((CODE, 48 + 9, 29, 3, 2), (CODE, 48 + 22, 27, 5, 0)),
        ],
        code=half * 2,
    )
    linked = LinkedObject(data, find)
    assert (call(linked, "f"), call(linked, "g")) == (45, 46)
    assert sorted(asked) == ["one", "two"]


@on_x86_64
def test_zeros_and_variables_can_be_written():
    """inc qword [rcx]; mov rax, [rcx]"""
    code = RELATIVE + b"\x48\xff\x01" + LOAD_RCX + RET
    for section, first in ((ZEROS, 1), (VARIABLES, 101)):
        data = object_file(
            [("f", CODE, 0), ("x", section, 0)],
            [(CODE, 9, 24, 2, 2)],
            code=code,
            variables=number(100),
            zeros=16,
        )
        linked = LinkedObject(data, no_symbols)
        assert [call(linked), call(linked)] == [first, first + 1]
        assert call(LinkedObject(data, no_symbols)) == first  # a copy of its own


@on_x86_64
def test_pointers_in_data():
    """A relocation in a section of data: a table of addresses."""
    data = object_file(
        [("f", CODE, 0), ("table", VARIABLES, 0), ("x", CONSTANTS, 8)],
        [(CODE, 9, 24, 2, 2), (VARIABLES, 0, 1, 3, 0)],
        code=RELATIVE + LOAD_RCX + b"\x48\x8b\x00" + RET,
        constants=number(11) + number(47),
        variables=bytes(8),
    )
    assert call(LinkedObject(data, no_symbols)) == 47


@on_x86_64
def test_rights_of_pages():
    """Code and constants can't be written, data can't be run."""
    data = object_file(
        [("f", CODE, 0), ("c", CONSTANTS, 0), ("v", VARIABLES, 0)],
        [],
        code=RET,
        constants=number(1),
        variables=number(2),
    )
    linked = LinkedObject(data, no_symbols)
    rights = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, right = line.split()[:2]
            first, last = (int(edge, 16) for edge in span.split("-"))
            for name in "fcv":
                if first <= linked.address(name) < last:
                    rights[name] = right[:3]
    assert rights == {"f": "r-x", "c": "r--", "v": "rw-"}


def simple(**changes):
    arguments = {
        "symbols": [("f", CODE, 0), ("x", CONSTANTS, 0), ("outside", 0, 0)],
        "relocations": [(CODE, 2, 1, 2, 0)],
        "code": b"\x48\xb8" + bytes(8) + b"\x48\x8b\x00" + RET,
        "constants": number(48),
    }
    return object_file(**{**arguments, **changes})


@on_x86_64
def test_unwind_tables_and_terminators_are_left_out():
    data = simple(
        terminators=bytes(8),
        unwind=b"unwind",
        relocations=[(CODE, 2, 1, 2, 0), (TERMINATORS, 0, 1, 1, 0), (UNWIND, 0, 99, 1, 0)],
    )
    assert call(LinkedObject(data, no_symbols)) == 48


REFUSED = {
    "unknown relocation": ({"relocations": [(CODE, 2, 4, 2, 0)]}, "kind 4 is not handled"),
    "missing symbol": ({"relocations": [(CODE, 2, 1, 3, 0)]}, "nobody has outside"),
    "symbol of nowhere": ({"relocations": [(CODE, 2, 1, 9, 0)]}, "for symbol 9, there are 4"),
    "outside of its section": ({"relocations": [(CODE, 7, 1, 2, 0)]}, "outside of its section"),
    "in a part left out": (
        {"symbols": [("f", CODE, 0), ("x", UNWIND, 0)], "unwind": b"1"},
        "x lies in a part that is not loaded",
    ),
    "past its section": (
        {"symbols": [("f", CODE, 0), ("x", CONSTANTS, 9)]},
        "x lies in a part that is not loaded",
    ),
    "common symbol": ({"symbols": [("f", 0xFFF2, 0), ("x", CODE, 0)]}, "a symbol of a kind"),
    "too large": ({"zeros": 2**40}, "bytes of memory"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    changes, text = REFUSED[what]
    with pytest.raises(NotLinkable, match=text):
        LinkedObject(simple(**changes), no_symbols)


def changed(data, at, form, value):
    data = bytearray(data)
    struct.pack_into(form, data, at, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("at", "form", "value", "text"),
    [
        (0, "<B", 0x7E, "not a little-endian 64-bit object"),
        (4, "<B", 1, "not a little-endian 64-bit object"),
        (5, "<B", 2, "not a little-endian 64-bit object"),
        (16, "<H", 3, "not an object for x86-64: type 3"),
        (18, "<H", 183, "machine 183"),
    ],
)
def test_other_files(at, form, value, text):
    with pytest.raises(NotLinkable, match=text):
        LinkedObject(changed(simple(), at, form, value), no_symbols)


def section_field(data, section, field, value):
    """``data`` with one field of a section header changed: (offset in the header, format)."""
    (start,) = struct.unpack_from("<Q", data, 40)
    at, form = {"type": (4, "<I"), "flags": (8, "<Q"), "align": (48, "<Q")}[field]
    return changed(data, start + 64 * section + at, form, value)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        (CODE, "flags", WRITE | ALLOCATE | EXECUTE),
        (CONSTANTS, "flags", ALLOCATE | 0x400),  # thread-local
        (CONSTANTS, "type", 14),  # to be called at start
        (CONSTANTS, "align", 1 << 20),
    ],
)
def test_sections_that_are_refused(section, field, value):
    with pytest.raises(NotLinkable, match="section"):
        LinkedObject(section_field(simple(), section, field, value), no_symbols)


def test_a_cut_object_is_refused():
    data = simple()
    for length in range(len(data)):
        with pytest.raises(NotLinkable):
            LinkedObject(data[:length], no_symbols)


def test_a_damaged_object_is_refused_or_linked():
    """Whatever a byte of the headers says, nothing but NotLinkable comes out."""
    data = simple()
    (start,) = struct.unpack_from("<Q", data, 40)
    refused = 0
    for at in [*range(64), *range(start, len(data))]:
        damaged = bytearray(data)
        damaged[at] = 0xFF
        try:
            LinkedObject(bytes(damaged), no_symbols)
        except NotLinkable:
            refused += 1
    assert refused > 50


@on_x86_64
def test_unknown_name():
    with pytest.raises(NotLinkable, match="does not define g"):
        LinkedObject(simple(), no_symbols).address("g")


@on_x86_64
def test_memory_that_can_not_be_made_executable(monkeypatch):
    """A hardened system: the caller asks the compiler's linker, which may have other ways."""

    def refuse(address, size, rights):
        raise OSError(13, "denied")

    monkeypatch.setattr(elf, "_protect", refuse)
    with pytest.raises(OSError, match="denied"):
        LinkedObject(simple(), no_symbols)
