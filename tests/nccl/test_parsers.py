"""Files with damage are judged as the parsers of NCCL and RCCL take or refuse them.

The recorded answers are those of NCCL's own parser (xml.cc of 2.20.5, 2.21.5, 2.30 and of RCCL,
with the limits of each version), compiled outside of the project. What 2.26.6 has in common with
2.20.5 is as in 2.20.5.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from homenode.errors import ParseError
from homenode.nccl.check import check_topology
from homenode.nccl.reader import XmlNode, read_topology
from homenode.nccl.topology import NcclVariant
from tests.nccl.mutants import COUNT, RECORDED, SEED, VERSIONS, marks, mutants, parsed

_NEWEST = {NcclVariant.NCCL: "nccl-2.30.7", NcclVariant.RCCL: "rccl"}
_ENDED_OTHERWISE = ("a value of", "a quote after", "more of a tag")
"""Expected of a value that opens with ' : RCCL lets any " end it."""


def wrong(files: list[bytes], accepted: list[frozenset[str]]) -> tuple[Counter[str], list[str]]:
    """Files that the check takes and a version refuses, by version; and what was expected of files
    that the check cannot read and the newest version takes."""
    false_accepts: Counter[str] = Counter()
    false_refusals: list[str] = []
    for data, takers in zip(files, accepted, strict=True):
        for flavour, newest in _NEWEST.items():
            found = check_topology(data, "t.xml", flavour)
            if not any(one.is_bad for one in found):
                of_flavour = {v for v in VERSIONS if (v == "rccl") == (flavour is NcclVariant.RCCL)}
                false_accepts.update(of_flavour - takers)
            unreadable = [one for one in found if one.id == "nccl-unreadable"]
            if unreadable and newest in takers:
                false_refusals.append(unreadable[0].expected)
    return false_accepts, false_refusals


def has_a_reason(expected: str) -> bool:
    """Closing tags with nothing open, which NCCL takes in pairs, and quotes that RCCL mixes."""
    return expected.startswith(("no closing tag", *_ENDED_OTHERWISE))


def test_no_file_passes_that_a_version_refuses() -> None:
    recorded = RECORDED.read_text().strip()
    bits = [int(mark, 32) for mark in recorded]
    accepted = [frozenset(v for i, v in enumerate(VERSIONS) if one >> i & 1) for one in bits]
    assert len(accepted) == COUNT
    assert all(50 < sum(v in one for one in accepted) < COUNT - 50 for v in VERSIONS)
    false_accepts, false_refusals = wrong(mutants(SEED, COUNT), accepted)
    assert not false_accepts
    assert all(map(has_a_reason, false_refusals)), false_refusals
    assert len(false_refusals) < COUNT // 50


def as_text(node: XmlNode) -> str:
    attributes = "".join(f" {name}={value};" for name, value in node.attributes)
    inside = "".join(as_text(child) for child in node.children if child.name != "xgmi")
    return f"({node.name}{attributes}{inside})"


@pytest.mark.lab
def test_files_are_read_as_by_nccls_parser() -> None:
    folder = os.environ.get("HOMENODE_NCCL_PARSERS")
    if folder is None:
        pytest.skip("HOMENODE_NCCL_PARSERS names no folder of parsers: see mutants.parsed")
    assert marks(parsed(Path(folder), mutants(SEED, COUNT))) == RECORDED.read_text().strip()
    files = mutants(1, 20_000)
    found = parsed(Path(folder), files)
    accepted = [
        frozenset(v for v, tree in zip(VERSIONS, of_file, strict=True) if tree is not None)
        for of_file in zip(*found, strict=True)
    ]
    false_accepts, false_refusals = wrong(files, accepted)
    assert not false_accepts
    assert all(map(has_a_reason, false_refusals)), Counter(false_refusals)
    trees = found[VERSIONS.index("nccl-2.30.7")]
    for data, tree in zip(files, trees, strict=True):
        try:
            read = read_topology(data, "t.xml")
        except ParseError:
            continue
        if tree is not None:
            assert "".join(map(as_text, read.systems)) == tree, data
