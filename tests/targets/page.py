"""The page targets.md, from the tables of the targets: `python -m tests.targets.page` writes it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from homenode.vm.targets.registry import TARGETS, target_named
from homenode.vm.targets.target import Feature, Level

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "targets.md"

_MARKS = {Level.NATIVE: "yes", Level.INDIRECT: "indirectly", Level.LOST: "**lost**"}


def targets_page(targets: Sequence[str] = TARGETS) -> str:
    """The page, whole, of these targets."""
    return "\n".join((*_head(targets), *_table(targets), *_details(targets))).rstrip() + "\n"


def _head(targets: Sequence[str]) -> Iterator[str]:
    names = ", ".join(f"`{name}`" for name in targets)
    yield from (
        "# Targets: what each hypervisor can say of a plan",
        "",
        f"`homenode plan --target NAME` writes a plan for {names}; without it, for libvirt.",
        "The page is written from the same tables that give the findings `target-lost` and",
        "`target-indirect`; a test compares it with what the written files say when read back.",
        "Which programs have read such files, in which version: "
        "[supported versions](supported-versions.md).",
        "",
        "* **yes**: an option of the hypervisor's own.",
        "* **indirectly**: by raw arguments or a script, at the price that is named.",
        "* **lost**: the hypervisor cannot say it; what the guest or the host then lacks is named.",
        "* **since**: the first version that has the option, where its sources say so. Of Proxmox,",
        "  that of its package qemu-server; QEMU's own are compared with `--qemu`.",
        "",
        "Once the VM runs, its guest is compared with the saved plan, under any hypervisor; what",
        "is lost is named, not compared: [verify](commands/verify.md#guests-of-targets).",
        "",
        "```console live",
        "$ homenode plan --target xen --vcpus 16 --memory 64GiB -o vm.cfg --save-plan p.json",
        "$ homenode verify --plan p.json --target xen --guest ssh:root@vm",
        "```",
        "",
    )


def _table(names: Sequence[str]) -> Iterator[str]:
    targets = [target_named(name) for name in names]
    yield f"| of the plan | {' | '.join(target.title for target in targets)} |"
    yield "|" + "---|" * (len(targets) + 1)
    for feature in Feature:
        marks = (_MARKS[target.support[feature].level] for target in targets)
        yield f"| {feature.words} | {' | '.join(marks)} |"
    yield ""


def _details(targets: Sequence[str]) -> Iterator[str]:
    for name in targets:
        target = target_named(name)
        yield from (f"## {target.title}", "", f"Source: {target.source}.", "")
        yield from ("| of the plan | how | price |", "|---|---|---|")
        for feature in Feature:
            support = target.support[feature]
            loses = "" if support.loses is None else support.loses
            if support.level is Level.LOST:
                loses = f"**lost**: {loses}"
            yield f"| {feature.words} | {support.how} | {loses} |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(targets_page())
