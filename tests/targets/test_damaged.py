"""Damaged files of targets are read, or refused by an error of ours; what is read stays stable."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homenode.errors import HomenodeError
from homenode.vm.plan import Unplannable
from homenode.vm.targets.registry import read_vm
from tests.targets.examples import FILES
from tests.targets.test_edited_files import plain
from tests.targets.written import edited

COUNT = int(os.environ.get("HOMENODE_FUZZ", "25"))
PIECES = (
    b"",
    b"\n",
    b"0",
    b"-1",
    b"99999999999999999999",
    b"[",
    b"]",
    b"{",
    b'"',
    b"'",
    b"\\",
    b"=",
    b":",
    b",",
    b"\x00",
    b"\xff",
    b"#",
    b"$(id)",
    b"\r",
    b"  ",
    b"0-3",
    b"%s",
    b"null",
    b"^1",
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    content = FILES[draw(st.sampled_from(sorted(FILES)))]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 12))
        content = content[:at] + draw(st.sampled_from(PIECES)) + content[at + length :]
    return content


@settings(max_examples=COUNT)
@given(damaged())
def test_a_damaged_file_is_read_or_refused_and_planned_twice_is_once(content: bytes) -> None:
    wanted = plain("pin-numa")
    try:
        assert read_vm(content, "vm").guest.vcpus > 0
        once = edited(content, "hgx-h100", wanted).rendering.document
    except (HomenodeError, Unplannable):
        return
    assert edited(once, "hgx-h100", wanted).rendering.document == once


@pytest.mark.parametrize("target", FILES)
def test_a_file_that_is_cut_anywhere_is_read_or_refused(target: str) -> None:
    content = FILES[target]
    for end in range(0, len(content), 17):
        try:
            read_vm(content[:end], "vm")
        except HomenodeError:
            continue
