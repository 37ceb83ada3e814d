"""Archives of strangers cost at most 2 s of CPU and 256 MiB; what is damaged is a message."""

import gzip
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homenode.errors import HomenodeError, InputError
from homenode.machine.snapshot.archive import read_archive
from homenode.vm.sources import load_host
from tests.hostile_archives import BOMBS, damaged, host_tar, long_member, member, pax
from tests.processes import run_text
from tests.seeds import part

ROOT = Path(__file__).parents[2]
SECONDS = 2
READER = """
import json, os, resource, sys, time
from homenode.errors import HomenodeError
from homenode.vm.sources import load_host
import homenode.machine.discover, homenode.machine.snapshot.store, homenode.vm.domain.read

load_host("small-2n8c-2gpu")
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * os.sysconf("SC_PAGE_SIZE") + (256 - 40 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[2:]:
    end = int(time.process_time()) + 1 + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    try:
        load_host(path)
        said = "read"
    except HomenodeError as error:
        said = str(error)
    print(json.dumps([path, said]), flush=True)
"""
"""Reads archives one after the other, each with so many seconds of CPU, all with 256 MiB."""


def test_archives_that_want_time_or_memory_get_little(tmp_path: Path) -> None:
    left, tried = [], part(list(BOMBS), 1, every=6)
    for number, name in enumerate(tried):
        left.append(tmp_path / f"{number}")
        left[-1].write_bytes(BOMBS[name]())
    names = dict(zip(map(str, left), tried, strict=True))
    found: dict[str, str] = {}
    while left:
        done = run_text([sys.executable, "-c", READER, str(SECONDS), *map(str, left)], cwd=ROOT)
        said = [json.loads(line) for line in done.stdout.splitlines()]
        found |= {names[path]: text for path, text in said}
        left = left[len(said) :]
        if left and done.returncode:
            found[names[str(left.pop(0))]] = f"ended by {done.returncode}: {done.stderr[-500:]}"
    assert found.keys() == set(tried)
    for name, text in found.items():
        assert text == "read" or ("expected" in text and "ended by" not in text), (name, text)


def test_the_limits_are_enforced(tmp_path: Path) -> None:
    """A reader without bounds does not pass."""
    for program in ("while True: pass", "x = bytes(300 << 20)"):
        code = READER.replace("load_host(path)", f"exec({program!r})")
        done = subprocess.run(
            [sys.executable, "-c", code, "0", "x"], capture_output=True, check=False, cwd=ROOT
        )
        assert done.returncode, program


def test_damaged_archives_are_read_or_refused_by_the_hundred(tmp_path: Path) -> None:
    source = tmp_path / "damaged"
    for content in damaged(7, 600):
        source.write_bytes(content)
        try:
            load_host(str(source))
        except HomenodeError as error:
            assert len(str(error)) < 2000


NAMES = st.lists(
    st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=90
    ).filter(lambda name: name not in (".", "..", "link")),
    min_size=1,
    max_size=4,
).map("/".join)
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


@settings(max_examples=60)
@given(st.dictionaries(NAMES, st.binary(max_size=1100), max_size=6), st.sampled_from(FORMATS))
def test_what_is_read_is_what_python_packed(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], form: int
) -> None:
    files = {"sys/x": b"1", **files}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=form) as tar:
        for name, content in files.items():
            one = tarfile.TarInfo(name)
            one.size = len(content)
            try:
                tar.addfile(one, io.BytesIO(content))
            except ValueError:  # too long for this format
                del content
                files = {key: value for key, value in files.items() if key != name}
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "x" * 99
        tar.addfile(link)
    path = tmp_path_factory.getbasetemp() / "packed"
    path.write_bytes(packed.getvalue())
    tree = read_archive(path)
    read = {name: text.encode("utf-8", "surrogateescape") for name, text in tree.files.items()}
    assert read == files
    assert tree.links == {"link": "x" * 99}


@pytest.mark.parametrize("size", [99, 100, 101, 155, 256, 4000])
def test_long_names_are_read_in_each_spelling(tmp_path: Path, size: int) -> None:
    name = "sys/" + "a/" * 5 + "x" * (size - 14)
    for content in (
        long_member(name, b"1") + bytes(1024),
        pax({"path": name}) + member("short", b"1") + bytes(1024),
    ):
        (tmp_path / "x").write_bytes(content)
        assert read_archive(tmp_path / "x").files == {name: "1"}


def test_a_name_before_a_global_header_stays_with_its_member(tmp_path: Path) -> None:
    content = pax({"comment": "x", "path": "no"}, b"g") + member("sys/x", b"1") + bytes(1024)
    (tmp_path / "x").write_bytes(content)
    assert read_archive(tmp_path / "x").files == {"sys/x": "1"}


def test_headers_of_old_tars_are_read(tmp_path: Path) -> None:
    """Without "ustar", directories end with a slash; some count bytes above 127 as negative."""
    old = bytearray(member("sys/\u00e9", b"1"))
    old[257:265] = bytes(8)
    old[156:157] = b"\0"
    old[148:156] = b" " * 8
    old[148:156] = b"%06o\0 " % sum(byte - 256 * (byte > 127) for byte in old[:512])
    (tmp_path / "x").write_bytes(bytes(old) + bytes(1024))
    assert read_archive(tmp_path / "x").files == {"sys/\u00e9": "1"}


def test_streams_one_after_the_other_are_one_archive(tmp_path: Path) -> None:
    whole = host_tar()
    packed = gzip.compress(whole[:5000]) + gzip.compress(whole[5000:]) + bytes(512)
    (tmp_path / "x").write_bytes(packed)
    assert load_host(str(tmp_path / "x")).nodes
    (tmp_path / "x").write_bytes(packed + b"junk")
    with pytest.raises(InputError, match="damaged"):
        read_archive(tmp_path / "x")
