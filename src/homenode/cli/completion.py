"""Completion: the layouts, hosts, tests, domains and findings that a shell may fill in. [I/O]

Each takes what was typed so far and gives candidates; typer keeps those that begin like it.
"""

from collections.abc import Iterable, Iterator

Candidates = list[tuple[str, str] | str]

_VIRSH_S = 3.0
"""A daemon that does not answer must not keep a shell waiting."""


def layouts(incomplete: str) -> Candidates:
    """Layouts with what each does, and auto."""
    from homenode.vm.layout import AUTO_SUMMARY, SUMMARIES

    return [("auto", AUTO_SUMMARY), *SUMMARIES.items()]


def layout_lists(incomplete: str) -> Candidates:
    """The last of several layouts with commas between them."""
    from homenode.vm.layout import PRESETS

    return _after_comma(incomplete, PRESETS)


def test_lists(incomplete: str) -> Candidates:
    """The last of several groups of tests with commas between them."""
    from homenode.measure.model import Group

    return _after_comma(incomplete, (str(one) for one in Group if one is not Group.APP))


def host_sources(incomplete: str) -> Candidates:
    """Names of shipped hosts, and files."""
    from homenode.description.shipped import shipped_hosts

    return [*shipped_hosts(), *_files(incomplete)]


def domain_names(incomplete: str) -> Candidates:
    """Domains of the system's libvirt; none where it does not answer."""
    from homenode.errors import ToolError
    from homenode.process import run

    argv = ("virsh", "-q", "-r", "-c", "qemu:///system", "list", "--all", "--name")
    try:
        listed = run(argv, _VIRSH_S).stdout_or_raise()
    except ToolError:
        return []
    return [line.strip() for line in listed.splitlines() if line.strip()]


def finding_ids(incomplete: str) -> Candidates:
    """Findings that have a page."""
    from homenode.catalogue import catalogue

    return sorted(catalogue())


def _after_comma(incomplete: str, known: Iterable[str]) -> Candidates:
    before, comma, _ = incomplete.rpartition(",")
    given = before.split(",")
    return [f"{before}{comma}{one}" for one in known if one not in given]


def _files(incomplete: str) -> Iterator[str]:
    """Paths that begin like this, as a shell names them."""
    from pathlib import Path

    folder, slash, name = incomplete.rpartition("/")
    try:
        for path in sorted(Path(folder or slash or ".").iterdir()):
            if path.name.startswith(name) and (name or not path.name.startswith(".")):
                yield f"{folder}{slash}{path.name}" + ("/" if path.is_dir() else "")
    except OSError:
        return
