"""Checks the dynamic section, which the loader reads, against the sections that the audit reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Library, Wheel
from flashvar_factory.audit.finding import Finding, some
from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import dynamic, elf, symbol_hash, unwinding

# What a linker writes into a library of ours. Other entries make a loader look for other libraries
# (auxiliary, filter, audit), write into code (TEXTREL), or are of other systems.
_TAGS = frozenset(
    {
        *range(1, 15),  # NEEDED to SONAME
        *(20, 21, 23, 24),  # PLTREL to BIND_NOW, without TEXTREL
        *(25, 26, 27, 28, 30),  # INIT_ARRAY, FINI_ARRAY and their sizes, FLAGS
        *(35, 36, 37),  # RELRSZ, RELR, RELRENT
        *(0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFF9, 0x6FFFFFFA),  # GNU_HASH, VERSYM, RELACOUNT, RELCOUNT
        *(0x6FFFFFFB, 0x6FFFFFFE, 0x6FFFFFFF),  # FLAGS_1, VERNEED, VERNEEDNUM
        *(0x70000001, 0x70000003, 0x70000005),  # of aarch64: BTI, PAC, calling conventions
    }
)
_REPORTED = frozenset({dynamic.RPATH, dynamic.RUNPATH})  # by `dependencies`
# Flags of the wheels' libraries: BIND_NOW, which resolves all functions at load time.
_FLAGS = {dynamic.FLAGS: 8, dynamic.FLAGS_1: 1}
# The kind of section (sh_type) that an entry's table lies in; then, that an entry has the size of.
_TABLES = {
    dynamic.SYMTAB: 11,
    4: symbol_hash.SYSTEM_V,  # HASH
    0x6FFFFEF5: 0x6FFFFFF6,  # GNU_HASH
    dynamic.VERSYM: 0x6FFFFFFF,
    dynamic.VERNEED: 0x6FFFFFFE,
    25: 14,  # INIT_ARRAY
    26: 15,  # FINI_ARRAY
    36: 19,  # RELR
}
_SIZES = {27: 14, 28: 15, 35: 19}
_RELOCATIONS, _RELOCATION_TABLES = 4, ((7, 8), (23, 2))  # RELA and RELASZ, JMPREL and PLTRELSZ
# SYMENT, RELAENT, PLTREL, RELRENT.
_CONSTANT = {11: 24, 9: 24, 20: 7, 37: 8}
# The sections that INIT, FINI and PLTGOT are at.
_NAMED_PLACES = {12: (".init",), 13: (".fini",), 3: (".got", ".got.plt")}
_DYNAMIC, _DYNSYM = 6, 11
_NAMED = (_DYNAMIC, _DYNSYM, dynamic.VERNEED)  # kinds of sections with names
_VERSIONS_NEEDED = 0x6FFFFFFF
_EXECUTABLE = 4  # of sh_flags
_ASKED = (0, 1, 2, 6)  # kinds: of any, data, functions, variables of threads
_FUNCTION, _SECTION = 2, 3
_LOCAL, _GLOBAL, _VISIBLE = 0, (1, 2), (0, 3)  # default or protected


def dynamic_section(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The loader uses the tables that the sections show, and loads and runs nothing else."""
    del expected
    for library in wheel.libraries:
        for message in (
            *_entries(library),
            *_places(library),
            *_names(library),
            *_symbols(library),
            *_lookups(library),
        ):
            yield Finding("dynamic_section", library.path, message)


def _entries(library: Library) -> Iterator[str]:
    found = library.dynamic
    name = library.path.rpartition("/")[2]
    if found.soname != name:
        yield f"expected the SONAME {name}, found {found.soname}"
    for tag in sorted(set(found.tags) - _TAGS - _REPORTED):
        yield f"expected known entries in the dynamic section, found the tag {tag:#x}"
    for tag, count in sorted(Counter(found.tags).items()):
        if count > 1 and tag not in (dynamic.NEEDED, *_REPORTED):
            yield f"expected one dynamic entry {tag:#x}, found {count}"
    if len(set(found.needed)) < len(found.needed):
        yield f"expected each needed library once (DT_NEEDED), found {', '.join(found.needed)}"
    strange = sorted(set(found.verneed) - set(found.needed))
    if strange:
        yield f"expected symbol versions of needed libraries alone, found {', '.join(strange)}"
    rows, _ = dynamic.tags(library.file)
    for tag, value in rows:
        if value & ~_FLAGS.get(tag, value):
            yield f"expected the flags {_FLAGS[tag]:#x} in dynamic entry {tag:#x}, found {value:#x}"
        if value != _CONSTANT.get(tag, value):
            yield f"expected {_CONSTANT[tag]} in dynamic entry {tag:#x}, found {value}"


def _places(library: Library) -> Iterator[str]:
    """Each table is where, and as long as, its section is."""
    file = library.file
    sections = [one for one in file.sections if one.name == ".dynamic" or one.kind == _DYNAMIC]
    segments = [one for one in file.segments if one.kind == elf.DYNAMIC]
    if [(one.offset, one.address, one.size) for one in sections] != [
        (one.offset, one.address, one.file_size) for one in segments
    ]:
        yield "expected one dynamic section, at the location of its segment, found them apart"
    rows, _ = dynamic.tags(file)

    def stated(wanted: int) -> list[int]:
        return [value for tag, value in rows if tag == wanted]

    names = [(one.address, len(one.content)) for one in file.named(".dynstr")]
    if names != [*zip(stated(dynamic.STRTAB), stated(dynamic.STRSZ), strict=False)]:
        yield "expected .dynstr at DT_STRTAB, of DT_STRSZ bytes, found another address or size"
    for tag, kind in _TABLES.items():
        wanted = [one.address for one in file.sections if one.kind == kind]
        if stated(tag) != wanted:
            yield f"expected dynamic entry {tag:#x} to be the address of its section, found another"
    for tag, kind in _SIZES.items():
        wanted = [one.size for one in file.sections if one.kind == kind]
        if stated(tag) != wanted:
            yield f"expected dynamic entry {tag:#x} to be the size of its section, found another"
    needed = [one.info for one in file.sections if one.kind == dynamic.VERNEED]
    if stated(_VERSIONS_NEEDED) != needed:
        yield "expected DT_VERNEEDNUM to be the libraries in .gnu.version_r, found another number"
    relocations = {
        (one.address, one.size)
        for one in file.sections
        if one.kind == _RELOCATIONS and one.allocated
    }
    found = {
        pair
        for place, size in _RELOCATION_TABLES
        for pair in zip(stated(place), stated(size), strict=False)
    }
    if found != relocations:
        yield "expected relocation sections at DT_RELA and DT_JMPREL, found other addresses"
    for tag, homes in _NAMED_PLACES.items():
        addresses = [one.address for name in homes for one in file.named(name)]
        for value in stated(tag):
            if value not in addresses:
                yield f"expected dynamic entry {tag:#x} at {homes[0]}, found it at {value:#x}"


def _names(library: Library) -> Iterator[str]:
    """The names of every table are those of .dynstr, which the loader takes."""
    file = library.file
    strings = [number for number, one in enumerate(file.sections) if one.name == ".dynstr"]
    for one in file.sections:
        if one.kind in _NAMED and [one.link] != strings:
            yield f"expected {one.name} to have .dynstr as its string table, found another section"


def _symbols(library: Library) -> Iterator[str]:
    file, found = library.file, library.dynamic
    yield from _unnamed(file)
    try:
        sizes = unwinding.functions(file)
    except BuildError as error:
        yield str(error).removeprefix(f"{library.path}: ")
        sizes = {}
    starts = list(sizes)
    for symbol in found.symbols:
        home = file.sections[symbol.section] if symbol.section < len(file.sections) else None
        inside = (
            home is not None
            and home.flags & _EXECUTABLE
            and home.address <= symbol.value < home.address + home.size
        )
        is_function = symbol.kind == _FUNCTION and symbol.binding in _GLOBAL
        if symbol.visibility not in _VISIBLE:
            yield f"expected {symbol.name} to be visible, found it hidden: some loaders ignore it"
        within = unwinding.around(symbol.value, sizes, starts)
        if not is_function or not inside or not _is_code(file, symbol.value):
            yield f"expected {symbol.name} to be a global function, found another symbol"
        elif within not in (None, (symbol.value, symbol.size)):
            yield (
                f"expected {symbol.name} to be a whole function, found {symbol.size} bytes at "
                f"{symbol.value:#x}: .eh_frame_hdr lists (address, bytes) {within}"
            )
    for name, count in Counter(symbol.name for symbol in found.symbols).items():
        if count > 1:
            yield f"expected one symbol {name}, found {count}"
    named: dict[int, list[str]] = {}
    for symbol in found.symbols:
        named.setdefault(symbol.value, []).append(symbol.name)
    for address, names in named.items():
        if len(names) > 1:
            yield f"expected a function for each name, found one at {address:#x}: {some(names)}"
    for name in found.versioned:
        yield f"expected {name} without a symbol version, found one: some loaders ignore it"


def _unnamed(file: elf.Elf) -> Iterator[str]:
    """Symbols without a name, or of the library alone: no reader of names sees them."""
    table = file.of_kind(_DYNSYM)
    if table is None:
        return
    symbols = list(file.symbols(table))
    first = next((i for i, one in enumerate(symbols) if one.binding in _GLOBAL), len(symbols))
    if table.info != first:
        yield f"expected {table.name} to state {first} symbols of its own, found {table.info}"
    for index, symbol in enumerate(symbols):
        facts = (symbol.value, symbol.size)
        if not index:
            wrong = bool(symbol.name) or any((*facts, symbol.section, symbol.kind, symbol.other))
        elif symbol.kind == _SECTION:
            wrong = not _is_of_section(file, symbol)
        else:
            wrong = (
                not symbol.name
                or symbol.binding not in _GLOBAL
                or symbol.other != symbol.visibility
                or (
                    symbol.section == 0
                    and (any(facts) or symbol.visibility != 0 or symbol.kind not in _ASKED)
                )
            )
        if wrong:
            yield f"expected symbol {index} to be a name that is asked for or shown, found another"
            return


def _is_of_section(file: elf.Elf, symbol: elf.Symbol) -> bool:
    """Whether a symbol is where a section starts; linkers for aarch64 list a few such."""
    if not 0 < symbol.section < len(file.sections):
        return False
    start = file.sections[symbol.section].address
    facts = (symbol.name, symbol.binding, symbol.other, symbol.size, symbol.value)
    return facts == ("", _LOCAL, 0, 0, start)


def _lookups(library: Library) -> Iterator[str]:
    """The loader finds by its hash table what the table of symbols shows, and nothing else."""
    file = library.file
    table, hashes = file.of_kind(_DYNSYM), file.of_kind(symbol_hash.GNU)
    if table is None or hashes is None:
        yield "expected a GNU hash table of its symbols, found none; link with --hash-style=gnu"
        return
    names = [symbol.name for symbol in file.symbols(table)]
    older = file.of_kind(symbol_hash.SYSTEM_V)
    every = tuple(sorted(name for name in names if name))
    try:
        # Some loaders take the older one, where it is there.
        tables = [("GNU", symbol_hash.found(hashes, names, library.path), library.dynamic.exported)]
        if older is not None:
            tables.append(("older", symbol_hash.found_by_older(older, names, library.path), every))
    except BuildError as error:
        yield str(error).removeprefix(f"{library.path}: ")
        return
    for which, found, wanted in tables:
        if tuple(sorted(found)) != wanted:
            differing = some(sorted({*found} ^ {*wanted})) or "one twice"
            yield (
                f"expected the exported symbols in the {which} hash table, found to differ: "
                f"{differing}"
            )


def _is_code(file: elf.Elf, address: int) -> bool:
    return any(
        one.kind == elf.LOAD
        and one.flags & elf.EXECUTE
        and one.address <= address < one.address + one.file_size
        for one in file.segments
    )
