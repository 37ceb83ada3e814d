"""Registry: the targets of homenode, those of other distributions, and docs/targets.md. [I/O]"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

from homenode.plugins import loaded, refused, registered
from homenode.vm.targets.hypervisors import NAMES
from homenode.vm.targets.target import Feature, Level, Target

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

TARGETS = NAMES
"""Each is TARGET of the module of that name in `hypervisors`."""

GROUP = "homenode.targets"
"""The entry points with which an installed distribution registers a Target by its name."""

_TAKEN = ("libvirt", *TARGETS)


def target_named(name: str) -> Target:
    """The target. Raises KeyError for an unknown name, InputError as `others`."""
    if name not in TARGETS:
        return _loaded(registered(GROUP, _TAKEN)[name])
    target = import_module(f"homenode.vm.targets.hypervisors.{name.replace('-', '_')}").TARGET
    assert isinstance(target, Target)
    return target


def others() -> tuple[str, ...]:
    """Names of targets that are not homenode's, sorted; nothing of them is loaded.

    Raises InputError for a name that is no name, is homenode's, or is registered twice.
    """
    return tuple(registered(GROUP, _TAKEN))


def recognised(content: bytes) -> str | None:
    """The target that a file is of, by its content. Others than ours are loaded, and asked, where
    none of ours takes it."""

    def one_of(names: tuple[str, ...]) -> str | None:
        return next((name for name in names if target_named(name).recognises(content)), None)

    return one_of(TARGETS) or one_of(others())


@lru_cache(maxsize=32)
def _loaded(one: "EntryPoint") -> Target:
    target = loaded(one, "a target")
    if not isinstance(target, Target):
        raise refused(one, "a homenode.vm.targets.target.Target", type(target).__name__)
    unsaid = [str(feature) for feature in Feature if feature not in target.support]
    if unsaid:
        raise refused(one, "support for every feature", f"none for {', '.join(unsaid)}")
    return target


_MARKS = {Level.NATIVE: "yes", Level.INDIRECT: "indirectly", Level.LOST: "**lost**"}


def targets_page(targets: Sequence[str] = TARGETS) -> str:
    """The page, whole, of these targets."""
    return "\n".join((*_head(targets), *_table(targets), *_details(targets))) + "\n"


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
        "",
        "Once the VM runs, its guest is compared with the saved plan, under any hypervisor; what",
        "is lost is named, not compared: [verify --target](commands/verify.md#guests-of-targets).",
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
