"""Archives that want a reader's time or memory, each small itself; and damaged ones."""

import base64
import bz2
import gzip
import io
import lzma
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from homenode.machine.description.parse import load_shipped
from tests.rendered.machine import render

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
MIB = 1 << 20


@cache
def small_host() -> Mapping[str, str]:
    """The files and tools' outputs of a small host, by their names in an archive."""
    snapshot = render(load_shipped("small-2n8c-2gpu"))
    files = {path.lstrip("/"): text for path, text in snapshot.files.items()}
    return files | {f"commands/{name}": text for name, text in snapshot.commands.items()}


@cache
def small_links() -> Mapping[str, str]:
    snapshot = render(load_shipped("small-2n8c-2gpu"))
    return {path.lstrip("/"): target for path, target in snapshot.links.items()}


def header(
    name: str, size: int = 0, kind: bytes = b"0", link: str = "", magic: bytes = b"ustar\x0000"
) -> bytes:
    """A tar's block; the checksum is right."""
    block = bytearray(512)
    block[:100] = name.encode()[:100].ljust(100, b"\0")
    block[100:108] = b"0000644\0"
    block[124:136] = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    block[156:157] = kind
    block[157:257] = link.encode()[:100].ljust(100, b"\0")
    block[257:265] = magic
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def signed_header(name: str) -> bytes:
    """A directory's block as some old tars write it: bytes above 127 count as negative."""
    block = bytearray(header(name, 0, b"5"))
    block[345:360] = b"\xff" * 15
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(memoryview(block).cast("b"))
    return bytes(block)


def member(name: str, content: bytes, kind: bytes = b"0") -> bytes:
    return header(name, len(content), kind) + content + bytes(-len(content) % 512)


def long_member(name: str, content: bytes = b"") -> bytes:
    return member("././@LongLink", name.encode() + b"\0", b"L") + member("x", content)


def pax(records: Mapping[str, str], kind: bytes = b"x") -> bytes:
    content = b""
    for key, value in records.items():
        rest = f" {key}={value}\n".encode()
        length = len(rest) + 1
        while len(str(length)) + len(rest) != length:
            length += 1
        content += str(length).encode() + rest
    return member("pax", content, kind)


END = bytes(1024)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def host_tar(files: Mapping[str, str] = {}, links: Mapping[str, str] = {}, *blocks: bytes) -> bytes:
    """The small host with other files in place of some of its own."""
    whole = {**small_host(), **files}
    return (
        b"".join(long_member(name, _bytes(text)) for name, text in whole.items())
        + b"".join(
            header(name, 0, b"2", target) for name, target in {**small_links(), **links}.items()
        )
        + b"".join(blocks)
        + END
    )


def zeros_after(start: bytes, count: int) -> bytes:
    """gzip of a beginning and so many zeros, without making them."""
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=9, mtime=0) as packed:
        packed.write(start)
        for _ in range(count // MIB):
            packed.write(bytes(MIB))
    return out.getvalue()


def _lists(times: int, chars: int) -> bytes:
    text = "0-3," * (chars // 4) + "0"
    names = [f"{CPU}/cpu{number}/topology/core_cpus_list" for number in range(8)]
    names += [f"{CPU}/cpu{number}/topology/package_cpus_list" for number in range(8)]
    names += [f"{NODE}/node{number}/cpulist" for number in range(2)]
    names += [f"{CPU}/cpu{number}/cache/index3/shared_cpu_list" for number in range(8)]
    return gzip.compress(host_tar(dict.fromkeys(names[:times], text)), 1)


def _hard_lists() -> bytes:
    text = ("0-3," * (4 * MIB) + "0").encode()
    linked = [
        header(f"{CPU}/cpu{number}/topology/{name}", 0, b"1", f"{CPU}/list")
        for number in range(64)
        for name in ("core_cpus_list", "package_cpus_list", "die_cpus_list")
    ]
    return gzip.compress(host_tar({}, {}, member(f"{CPU}/list", text), *linked), 1)


def _shared(count: int, size: int) -> bytes:
    """One file, and hard links to it."""
    linked = b"".join(
        header(f"{CPU}/copy{number}", 0, b"1", f"{CPU}/one") for number in range(count)
    )
    return gzip.compress(member(f"{CPU}/one", b"1" * size) + linked + END, 1)


def _many(count: int, name: Callable[[int], str], text: str = "1") -> bytes:
    blocks = (member(name(number), text.encode()) for number in range(count))
    return gzip.compress(host_tar({}, {}, b"".join(blocks)), 1)


def _cpus(count: int) -> bytes:
    blocks = [
        member(f"{CPU}/cpu{number}/topology/{name}", text.encode())
        for number in range(count)
        for name, text in (("core_cpus_list", f"{number}"), ("physical_package_id", f"{number}"))
    ]
    files = {f"{CPU}/online": f"0-{count - 1}", f"{NODE}/node0/cpulist": f"0-{count - 1}"}
    return gzip.compress(host_tar(files, {}, b"".join(blocks)), 1)


def _functions(count: int) -> bytes:
    blocks = []
    for number in range(count):
        bdf = f"{number >> 16:04x}:{number >> 8 & 255:02x}:{number >> 3 & 31:02x}.{number & 7}"
        directory = f"sys/devices/pci0000:00/{bdf}"
        blocks += [
            member(f"{directory}/class", b"0x030200"),
            header(f"sys/bus/pci/devices/{bdf}", 0, b"2", f"../../../devices/pci0000:00/{bdf}"),
        ]
    return gzip.compress(host_tar({}, {}, b"".join(blocks)), 1)


def _nodes(count: int) -> bytes:
    row = "10 " + "20 " * (count - 1)
    blocks = b"".join(
        member(f"{NODE}/node{number}/{name}", text.encode())
        for number in range(count)
        for name, text in (("distance", row), ("cpulist", "" if number else "0-7"))
    )
    return gzip.compress(host_tar({f"{NODE}/online": f"0-{count - 1}"}, {}, blocks), 1)


def _chain(count: int, parts: int) -> bytes:
    """Links in a chain, each to the next one by a long way round."""
    way = "./" * parts
    links = {
        f"sys/bus/pci/devices/0000:00:{number >> 3:02x}.{number & 7}": f"{way}l{number}-0"
        for number in range(count)
    }
    more = [
        pax({"linkpath": f"{way}l{number}-{step + 1}"})
        + header(f"sys/bus/pci/devices/l{number}-{step}", 0, b"2", "x")
        for number in range(count)
        for step in range(30)
    ]
    return gzip.compress(host_tar({}, links, *more), 1)


def _xz(content: bytes) -> bytes:
    return lzma.compress(content, preset=1)


def _big_dictionary() -> bytes:
    """The first block's header says 1.5 GiB; to pack so would take as much."""
    packed = bytearray(_xz(host_tar()))
    end = 12 + (packed[12] + 1) * 4
    packed[16] = 37
    packed[end - 4 : end] = zlib.crc32(packed[12 : end - 4]).to_bytes(4, "little")
    return bytes(packed)


def _noise(count: int, seed: int = 3) -> bytes:
    return random.Random(seed).randbytes(count)


BOMBS: Mapping[str, Callable[[], bytes]] = {
    "26 lists of 3 MiB": lambda: _lists(26, 3 * MIB),
    "26 lists of 60 KiB": lambda: _lists(26, 60_000),
    "26 lists of 4096 parts": lambda: _lists(26, 16_000),
    "a list of 16 MiB linked 192 times": _hard_lists,
    "a file of 1 MiB linked 70,000 times": lambda: _shared(70_000, MIB),
    "a file of 100 bytes linked 79,000 times": lambda: _shared(79_000, 100),
    "a file of 8 GiB": lambda: zeros_after(header("sys/big", 8 << 30), 32 * MIB),
    "a file of 7 MiB 16 times": lambda: gzip.compress(
        member("sys/x", bytes(7 * MIB)) * 16 + END, 1
    ),
    "files of one letter beyond latin": lambda: gzip.compress(
        b"".join(
            member(f"sys/{n}", b"a" * (4 * MIB - 8) + "\U0001f600".encode()) for n in range(30)
        )
        + END,
        1,
    ),
    "zeros after its end": lambda: zeros_after(host_tar(), 140 * MIB),
    "a pax header of 100 MB": lambda: gzip.compress(
        header("pax", 100_000_000, b"x") + bytes(100_000_000), 1
    ),
    "a pax record of 100 MB": lambda: gzip.compress(
        member("pax", b"100000012 path=" + b"a" * 100_000_000 + b"\n", b"x"), 1
    ),
    "a global pax header of 100 MB": lambda: gzip.compress(
        header("pax", 100_000_000, b"g") + bytes(100_000_000), 1
    ),
    "a long name of 100 MB": lambda: gzip.compress(
        header("././@LongLink", 100_000_000, b"L") + b"a" * 100_000_000, 1
    ),
    "79,000 pax headers": lambda: gzip.compress(
        pax({"comment": "a" * 200}) * 79_000 + member("sys/x", b"") + END, 1
    ),
    "pax headers of 64 KiB": lambda: gzip.compress(
        (pax({str(n): "" for n in range(6000)}) + member("sys/x", b"")) * 1000 + END, 1
    ),
    "a sparse file": lambda: gzip.compress(header("sys/x", 1 << 40, b"S") + END, 1),
    "a sparse file of pax": lambda: gzip.compress(
        pax({"GNU.sparse.major": "1", "GNU.sparse.map": "0,0," * 9000}) + member("x", b"") + END, 1
    ),
    "a negative size": lambda: header("x")[:124] + b"\xff" * 12 + header("x")[136:] + END,
    "a size of 8 EiB": lambda: header("sys/x", 1 << 63) + END,
    "a pax size of 8 EiB": lambda: pax({"size": str(1 << 63)}) + header("sys/x") + END,
    "a pax size that is negative": lambda: pax({"size": "-512"}) + header("sys/x") + END,
    "a pax size of 4,000 digits": lambda: pax({"size": "9" * 5000}) + header("sys/x") + END,
    "500,000 members": lambda: gzip.compress(header("sys/a", 0, b"5") * 500_000 + END, 1),
    "79,000 directories of an old tar": lambda: gzip.compress(
        b"".join(signed_header(f"sys/{n}") for n in range(79_000)) + END, 1
    ),
    "an lspci of 7 million lines": lambda: gzip.compress(
        host_tar({"commands/lspci": "\n" * (7 * MIB)}), 1
    ),
    "75,000 directories": lambda: gzip.compress(
        b"".join(header(f"sys/{n}/{n}", 0, b"5") for n in range(75_000)) + END, 1
    ),
    "30,000 machines": lambda: gzip.compress(
        b"".join(header(f"{n}/sys/bus", 0, b"5") for n in range(30_000)) + END, 1
    ),
    "paths of 4,000 letters": lambda: gzip.compress(
        b"".join(long_member("/".join([f"{n:06}" * 10] * 63)) for n in range(3000)) + END, 1
    ),
    "paths of 2,000 parts": lambda: gzip.compress(long_member("sys/" + "a/" * 2000) + END, 1),
    "links in circles": lambda: gzip.compress(
        host_tar({}, {"sys/bus/pci/devices": "../pci/devices", "sys/devices/system/cpu": "cpu"}), 1
    ),
    "hard links in circles": lambda: header("sys/a", 0, b"1", "sys/b") + END,
    "chains of links": lambda: _chain(250, 400),
    "30,000 CPUs": lambda: _cpus(30_000),
    "65,535 directories of CPUs": lambda: _many(65_535, lambda n: f"{CPU}/cpu{n}/x"),
    "35,000 functions": lambda: _functions(35_000),
    "1,000 nodes": lambda: _nodes(1000),
    "3,000 nodes": lambda: _nodes(3000),
    "a cpuinfo of 7 MiB": lambda: gzip.compress(
        host_tar({"proc/cpuinfo": "processor\t: 0\nmodel name\t: x\n\n" * (7 * MIB // 32)}), 1
    ),
    "an lspci of 7 MiB": lambda: gzip.compress(
        host_tar(
            {"commands/lspci": "00:01.0 VGA compatible controller: x\n\tLnkSta: x\n" * 130_000}
        ),
        1,
    ),
    "bzip2 of noise": lambda: bz2.compress(member("sys/x", _noise(5 * MIB)) + END),
    "bzip2 of little noise": lambda: bz2.compress(member("sys/x", _noise(4 * MIB - 50_000)) + END),
    "xz of letters": lambda: _xz(member("sys/x", base64.b64encode(_noise(3 * MIB))) + END),
    "gzip of noise": lambda: gzip.compress(member("sys/x", _noise(7 * MIB)) * 8 + END, 0),
    "xz with a dictionary of 1.5 GiB": _big_dictionary,
    "bzip2 of zeros": lambda: bz2.compress(member("sys/x", b"") + bytes(140 * MIB)),
    "100,000 streams of gzip": lambda: gzip.compress(b"", 1) * 100_000 + gzip.compress(host_tar()),
    "100,000 streams of bzip2": lambda: bz2.compress(b"") * 100_000 + bz2.compress(host_tar()),
    "100,000 streams of xz": lambda: _xz(b"") * 100_000 + _xz(host_tar()),
    "a name in gzip's header of 60 MiB": lambda: (
        b"\x1f\x8b\x08\x08" + bytes(6) + b"a" * (60 * MIB) + b"\0"
    ),
    "an archive in an archive": lambda: gzip.compress(gzip.compress(host_tar())),
}
"""What each wants; the reader says no, or reads it, within its limits."""


def damaged(seed: int, count: int) -> Iterator[bytes]:
    """Small archives with something wrong: bytes changed with the checksum made good again, cut
    short, members doubled, dropped or of other kinds; packed in each way, damaged again or not."""
    rng = random.Random(seed)
    files = list(small_host().items())
    packers = (bytes, lambda b: gzip.compress(b, 1), bz2.compress, _xz)
    for _ in range(count):
        chosen = rng.sample(files, rng.randint(1, 60))
        blocks = [member(name, _bytes(text)) for name, text in chosen if len(name) < 100]
        for _ in range(rng.randint(0, 8)):
            name, other = rng.choice(files)[0], rng.choice(files)[0]
            kind = rng.choice([b"1", b"2", b"5", b"3", b"S", b"L", b"K", b"x", b"g", b"7", b"Z"])
            size = rng.choice([0, 0, 1, 511, 513, 1 << 20, 8**11 - 1, 1 << 62])
            blocks.insert(rng.randint(0, len(blocks)), header(name, size, kind, other))
        if rng.random() < 0.3:
            key = rng.choice(["path", "linkpath", "size", "GNU.sparse.map", "mtime", ""])
            value = rng.choice(["../x", "/abs", "9" * 30, "-1", "\0", "a\nb", "x" * 5000, ""])
            blocks.insert(rng.randint(0, len(blocks)), pax({key: value}))
        content = bytearray(b"".join(blocks) + END)
        for _ in range(rng.randint(0, 3)):
            at = rng.randrange(len(content)) // 512 * 512 + rng.randrange(345)
            content[at] = rng.choice((0, 0x20, 0x2F, 0x2E, 0x37, 0x80, 0xFF, rng.randrange(256)))
            start = at // 512 * 512
            content[start + 148 : start + 156] = b" " * 8
            summed = sum(content[start : start + 512])
            content[start + 148 : start + 156] = b"%06o\0 " % summed
        packed = bytearray(rng.choice(packers)(bytes(content)))
        if rng.random() < 0.2:
            packed[rng.randrange(len(packed))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.2:
            packed = packed[: rng.randrange(len(packed))]
        yield bytes(packed)
