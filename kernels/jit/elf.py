"""Link one relocatable ELF object into memory, without a linker and without the compiler's own.

Importing the compiler for its linker takes most of a second; an object needs a few kinds of
relocation only. What is not known here is refused, and the caller takes the compiler's linker.
Source: System V ABI, AMD64 supplement, 4.4 (relocation) and 3.5.2 (large code models).
"""

import ctypes
import mmap
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass

_RELOCATABLE, _X86_64 = 1, 62
_SYMBOLS, _RELOCATIONS, _NO_CONTENT, _TERMINATORS = 2, 4, 8, 15  # types of section
_KNOWN_TYPES = {1, _NO_CONTENT}  # of what is put into memory: contents, zeros
_UNWIND = 0x70000001
_WRITE, _ALLOCATE, _EXECUTE, _THREAD_LOCAL = 1, 2, 4, 0x400
_UNDEFINED, _ABSOLUTE, _FIRST_RESERVED = 0, 0xFFF1, 0xFF00
# Kinds of relocation; S symbol, A addend, P place, G offset in the table GOT.
_64, _PC64, _GOTOFF64, _GOT64, _GOTPC64 = 1, 24, 25, 27, 29
_TABLE = "_GLOBAL_OFFSET_TABLE_"
_LIMIT = 64 * 2**20  # bytes in memory; kernels take some 100 KB


class NotLinkable(Exception):
    """An object of a kind that is not handled here."""


@dataclass(frozen=True)
class _Section:
    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int

    @property
    def loaded(self) -> bool:
        """Whether it goes to memory: not unwind tables, which only C++ exceptions read, and not
        what is called when a library is closed, which never happens."""
        wanted = self.flags & _ALLOCATE and self.size > 0
        return (
            bool(wanted) and self.type not in (_UNWIND, _TERMINATORS) and self.name != ".eh_frame"
        )


class LinkedObject:
    """Code and data of one object. Never unmapped: a thread may still run it when Python ends."""

    def __init__(self, data: bytes, find: Callable[[str], int]):
        """
        Args:
            data: an object for 64-bit x86.
            find: address of a symbol that the object wants from outside; raises NotLinkable.

        Raises:
            NotLinkable: the object is damaged or holds what is not handled here.
            OSError: memory can't be had or can't be made executable.
        """
        try:
            self._symbols = _link(data, find)
        except (struct.error, LookupError, ValueError, OverflowError) as error:
            raise NotLinkable(f"the object is damaged: {error}") from error

    def address(self, name: str) -> int:
        """Where ``name`` is; raises NotLinkable if the object does not define it."""
        try:
            return self._symbols[name]
        except KeyError:
            raise NotLinkable(f"the object does not define {name}") from None


def _link(data: bytes, find: Callable[[str], int]) -> dict[str, int]:
    sections = _sections(data)
    symbols = _symbols(data, sections)
    relocations = _relocations(data, sections, len(symbols))
    table_of = {}  # symbol -> place in the table of addresses
    for _, _, kind, symbol, _ in relocations:
        if kind == _GOT64:
            table_of.setdefault(symbol, 8 * len(table_of))

    # Pages of their own for code, constants and variables; the table stands after the variables.
    groups = [(_EXECUTE, []), (0, []), (_WRITE, [])]
    for number, section in enumerate(sections):
        if section.loaded:
            rights = section.flags & (_EXECUTE | _WRITE)
            next(members for want, members in groups if want == rights).append(number)
    place, spans, end = {}, [], 0
    for rights, members in groups:
        start = end = _up(end, mmap.PAGESIZE)
        for number in members:
            end = _up(end, sections[number].align)
            place[number] = end
            end += sections[number].size
        spans.append((rights, start))
    table = _up(end, 8)
    size = _up(table + 8 * len(table_of) + 8, mmap.PAGESIZE)

    if size > _LIMIT:
        raise NotLinkable(f"it wants {size} bytes of memory, at most {_LIMIT} are given")
    image = bytearray(size)
    for number, at in place.items():
        section = sections[number]
        if section.type != _NO_CONTENT:
            image[at : at + section.size] = _slice(data, section.offset, section.size)
    base = _map(size)

    def address(symbol: int) -> int:
        name, where, value = symbols[symbol]
        if name == _TABLE:
            return base + table
        if where == _UNDEFINED:
            return find(name)
        if where == _ABSOLUTE:
            return value
        if where not in place or value > sections[where].size:
            raise NotLinkable(f"{name or where} lies in a part that is not loaded")
        return base + place[where] + value

    for symbol, at in table_of.items():
        struct.pack_into("<Q", image, table + at, address(symbol))
    for number, offset, kind, symbol, addend in relocations:
        if offset + 8 > sections[number].size:
            raise NotLinkable("a relocation lies outside of its section")
        at = place[number] + offset
        if kind == _64:
            value = address(symbol) + addend
        elif kind == _PC64:
            value = address(symbol) + addend - (base + at)
        elif kind == _GOTOFF64:
            value = address(symbol) + addend - (base + table)
        elif kind == _GOT64:
            value = table_of[symbol] + addend
        else:
            value = base + table + addend - (base + at)
        struct.pack_into("<Q", image, at, value & (2**64 - 1))

    ctypes.memmove(base, bytes(image), size)
    for (rights, start), (_, end) in zip(spans, [*spans[1:], (0, size)], strict=True):
        if rights != _WRITE and end > start:
            code = mmap.PROT_EXEC if rights == _EXECUTE else 0
            _protect(base + start, end - start, mmap.PROT_READ | code)
    return {
        name: base + place[where] + value
        for name, where, value in symbols
        if name and where in place
    }


def _sections(data: bytes) -> list[_Section]:
    if sys.byteorder != "little" or data[:6] != b"\x7fELF\x02\x01":
        raise NotLinkable("not a little-endian 64-bit object")
    kind, machine = struct.unpack_from("<HH", data, 16)
    if (kind, machine) != (_RELOCATABLE, _X86_64):
        raise NotLinkable(f"not an object for x86-64: type {kind}, machine {machine}")
    (start,) = struct.unpack_from("<Q", data, 40)
    entry_size, count, names = struct.unpack_from("<HHH", data, 58)
    raw = [struct.unpack_from("<IIQQQQIIQQ", data, start + i * entry_size) for i in range(count)]
    text_at, text_size = raw[names][4:6]
    text = _slice(data, text_at, text_size)
    found = []
    for name, type_, flags, _, offset, size, link, info, align, _ in raw:
        section = _Section(_text(text, name), type_, flags, offset, size, link, info, align or 1)
        if section.loaded:
            rights = flags & (_WRITE | _EXECUTE)
            if type_ not in _KNOWN_TYPES or flags & _THREAD_LOCAL or rights == _WRITE | _EXECUTE:
                raise NotLinkable(f"section {section.name} is of a kind that is not handled")
            if section.align > mmap.PAGESIZE:
                raise NotLinkable(f"section {section.name} is aligned to {section.align} bytes")
        found.append(section)
    return found


def _symbols(data: bytes, sections: list[_Section]) -> list[tuple[str, int, int]]:
    """(name, section number, value) of every symbol."""
    (table,) = [section for section in sections if section.type == _SYMBOLS]
    names = sections[table.link]
    text = _slice(data, names.offset, names.size)
    found = []
    for name, _, _, where, value, _ in struct.iter_unpack(
        "<IBBHQQ", _slice(data, table.offset, table.size)
    ):
        if where >= _FIRST_RESERVED and where != _ABSOLUTE:
            raise NotLinkable("a symbol of a kind that is not handled")
        found.append((_text(text, name), where, value))
    return found


def _relocations(data: bytes, sections: list[_Section], symbols: int):
    """(section number, offset, kind, symbol number, addend) of what goes to memory."""
    found = []
    for section in sections:
        if section.type != _RELOCATIONS or not sections[section.info].loaded:
            continue
        for offset, info, addend in struct.iter_unpack(
            "<QQq", _slice(data, section.offset, section.size)
        ):
            kind, symbol = info & 0xFFFFFFFF, info >> 32
            if kind not in (_64, _PC64, _GOTOFF64, _GOT64, _GOTPC64):
                raise NotLinkable(f"relocation of kind {kind} is not handled")
            if symbol >= symbols:
                raise NotLinkable(f"relocation for symbol {symbol}, there are {symbols}")
            found.append((section.info, offset, kind, symbol, addend))
    return found


def _slice(data: bytes, offset: int, size: int) -> bytes:
    if offset + size > len(data):
        raise NotLinkable("the object is cut short")
    return data[offset : offset + size]


def _text(table: bytes, start: int) -> str:
    return table[start : table.index(b"\0", start)].decode()


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _map(size: int) -> int:
    """Address of ``size`` bytes that may be read and written."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "no memory for a compiled kernel")
    return address


def _protect(address: int, size: int, rights: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(address, size, rights):
        raise OSError(ctypes.get_errno(), "memory of a compiled kernel can't be made executable")
