"""What doctor and expect do with --pool: many hosts at once. [I/O]"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from homenode.cli.terminal import console, note, print_findings, write_text
from homenode.errors import FINDINGS, UsageError

if TYPE_CHECKING:
    from homenode.machine.topology import Host

_MOST_NAMES = 8


def compare_hosts(sources: Sequence[str], *, as_json: bool) -> None:
    """Print how hosts differ from the majority of their kind; exit 1 where one does."""
    from homenode.check.doctor.fleet import LEAST, compare_fleet
    from homenode.doc import Doc, Table
    from homenode.findings import Findings
    from homenode.wording import plural, printable

    fleet = compare_fleet(_hosts(sources))
    checked = tuple(f"{plural(count, 'host')}: {kind}" for kind, count in fleet.kinds)
    if as_json:
        findings = Findings(
            checked=checked, findings=tuple(one.as_finding() for one in fleet.differences)
        )
        print_findings(findings, as_json=True)
    else:
        rows = tuple(
            (
                str(one.finding.severity),
                f"{len(one.hosts)} of {one.of_hosts}" + (", no majority" if one.is_tie else ""),
                one.finding.subject,
                one.finding.expected,
                one.finding.observed,
                ", ".join(one.hosts[:_MOST_NAMES]) + (" …" if len(one.hosts) > _MOST_NAMES else ""),
            )
            for one in fleet.differences
        )
        if rows:
            columns = ("severity", "hosts", "what", "most have", "these have", "which")
            console().print(Doc("", (Table(heads=columns, rows=rows, folds=columns[-1:]),)))
        for line in checked:
            note(line)
        if fleet.alone:
            note(f"not compared, fewer than {LEAST} of a kind: {printable(', '.join(fleet.alone))}")
        if not rows:
            note("no differences")
    if fleet.differences:
        raise SystemExit(FINDINGS)


def certify_majority(sources: Sequence[str], output: Path, floors: dict[str, float]) -> None:
    """Write what most hosts of a pool are like. Raises UsageError for several kinds of them."""
    from msgspec.structs import replace

    from homenode.check.doctor.expectation import certify
    from homenode.check.doctor.expectation_file import render_expectation
    from homenode.check.doctor.fleet import LEAST, compare_fleet, kind_of, majority
    from homenode.wording import printable

    hosts = _hosts(sources)
    kinds = list(dict.fromkeys(kind_of(host) for _, host in hosts))
    if len(kinds) > 1:
        raise UsageError(
            f"--pool: expected hosts of one kind, found {len(kinds)}: {'; '.join(map(str, kinds))}",
            hint="one file for each kind: name its hosts alone",
        )
    if len(hosts) < LEAST:
        raise UsageError(
            f"--pool: expected at least {LEAST} hosts, found {len(hosts)}: of two that differ "
            "neither is known to be right",
            hint="homenode watch certify --host SOURCE records one host",
        )
    common = majority([certify(host) for _, host in hosts], str(kinds[0]))
    write_text(output, render_expectation(replace(common, floors=floors)))
    for one in compare_fleet(hosts).differences:
        if one.is_tie:
            subject, observed = printable(one.finding.subject), printable(one.finding.observed)
            note(f"no majority: {subject}: {len(one.hosts)} of {one.of_hosts} hosts: {observed}")
    note(f"what most of {len(hosts)} hosts are like; homenode doctor --pool says which differ")


def _hosts(sources: Sequence[str]) -> "list[tuple[str, Host]]":
    from homenode.cli.pool_reading import note_failures, progress
    from homenode.cluster.pool.sources import load_whole_hosts

    with progress("reading hosts") as show_progress:
        pool, hosts = load_whole_hosts(sources, show_progress)
    note_failures(pool)
    return hosts
