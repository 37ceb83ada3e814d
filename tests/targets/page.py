"""The page targets.md, from the tables of the targets: `python -m tests.targets.page` writes it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from homenode.vm.targets.registry import TARGETS, find_target
from homenode.vm.targets.target import Feature, SupportLevel

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "targets.md"

_MARKS = {
    SupportLevel.NATIVE: "yes",
    SupportLevel.INDIRECT: "indirectly",
    SupportLevel.LOST: "**lost**",
}


def targets_page(targets: Sequence[str] = TARGETS) -> str:
    """The page, whole, of these targets."""
    return "\n".join((*_head(targets), *_table(targets), *_details(targets))).rstrip() + "\n"


def _head(targets: Sequence[str]) -> Iterator[str]:
    names = ", ".join(f"`{name}`" for name in targets)
    yield from (
        "# Targets: hypervisors and their features",
        "",
        f"`homenode plan --target NAME` writes a plan for {names}. Default: the file's own target;",
        "`xen` if the host is the output of `xl info -n`; else libvirt.",
        "This page is generated from the tables behind the findings `target-lost` and",
        "`target-indirect`; a test compares it with written files that are read back.",
        "[Supported versions](supported-versions.md) lists the programs that read such files.",
        "",
        "* **yes**: an option of the hypervisor itself.",
        "* **indirectly**: by raw arguments or a script, with the named disadvantage.",
        "* **lost**: not supported; the consequence for guest or host is named.",
        "* **since**: the first version with the option, if the sources state it: for Proxmox the",
        "  version of its package qemu-server. QEMU's versions are compared with `--qemu`.",
        "",
        "The guest of a running VM is compared with the saved plan, under any hypervisor; lost",
        "features are named, not compared: [verify](commands/verify.md#guests-of-targets).",
        "",
        "```console live",
        "$ homenode plan --target xen --vcpus 16 --memory 64GiB -o vm.cfg --save-plan p.json",
        "$ homenode verify --plan p.json --target xen --guest ssh:root@vm",
        "```",
        "",
    )


def _table(names: Sequence[str]) -> Iterator[str]:
    targets = [find_target(name) for name in names]
    yield f"| feature | {' | '.join(target.title for target in targets)} |"
    yield "|" + "---|" * (len(targets) + 1)
    for feature in Feature:
        marks = (_MARKS[target.support[feature].level] for target in targets)
        yield f"| {feature.words} | {' | '.join(marks)} |"
    yield ""


def _details(targets: Sequence[str]) -> Iterator[str]:
    for name in targets:
        target = find_target(name)
        yield from (f"## {target.title}", "", f"Source: {target.source}.", "")
        yield from ("| feature | how | disadvantage |", "|---|---|---|")
        for feature in Feature:
            support = target.support[feature]
            loses = "" if support.loses is None else support.loses
            if support.level is SupportLevel.LOST:
                loses = f"**lost**: {loses}"
            yield f"| {feature.words} | {support.how} | {loses} |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(targets_page())
