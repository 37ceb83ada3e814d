"""Apply and restore killed at each call of virsh, with somebody's edits in between: none is lost.

And the same edits between two calls of a run that is not killed.
"""

import contextlib
import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from homenode.change.apply.define_step import ApplyOutcome, make_edited_error
from homenode.change.apply.definition import (
    apply_definition,
    forget_original,
    preview_restore,
    restore_definition,
)
from homenode.change.journal import ChangeState, DomainStore
from homenode.errors import InputError
from homenode.vm.domain.merge import add_libvirt_parts, is_same_definition
from homenode.vm.domain.read import open_domain
from homenode.vm.hypervisor.virsh import Virsh
from tests.apply_documents import NAME, ORIGINAL, tuned
from tests.processes import code_of, start_child
from tests.seeds import part
from tests.verify_documents import PLAIN
from tests.virsh_stand_in import SESSION as URI
from tests.virsh_stand_in import UUID, StandIn

TITLE = b"<title>mine</title>"
EARLIER = b"<description>earlier</description>"
Work = Callable[[Path], object]


def apply(root: Path, layout: str) -> ApplyOutcome:
    virsh = Virsh(URI)
    original = virsh.read_definition(UUID)
    return apply_definition(virsh, NAME, tuned(layout, original), original, root)


def restore(root: Path, *, keep_edits: bool = False) -> None:
    restore_definition(Virsh(URI), NAME, root, keep_edits=keep_edits)


WORK: dict[str, tuple[str | None, Work]] = {
    "apply": (None, partial(apply, layout="pin-numa")),
    "apply over another": ("pin-numa", partial(apply, layout="pin")),
    "restore": ("pin-numa", restore),
    "restore keeping edits": ("pin-numa, edited", partial(restore, keep_edits=True)),
    "forget": ("pin-numa, edited", partial(forget_original, Virsh(URI), NAME)),
}
"""By name: the layout that is there before, and what is killed."""

CHANGES = {"define"}
"""Calls that change a definition: a kill after any other is one before the next."""

AFTERWARDS: tuple[tuple[Work, ...], ...] = (
    (restore,),
    (partial(apply, layout="pin-numa-pci"), restore),
    (partial(restore, keep_edits=True), restore),
)


class Start:
    """A daemon and a state directory as they were before the work, as often as is asked."""

    def __init__(self, daemon: StandIn, root: Path, layout: str | None) -> None:
        self.daemon, self.root, self._kept = daemon, root, root.with_name("kept")
        root.mkdir()
        name, _, is_edited = (layout or "").partition(", ")
        if name:
            apply(root, name)
        if is_edited:
            daemon.put_definition(daemon.definition().replace(b"</name>", b"</name>" + EARLIER))
        shutil.copytree(root, self._kept)
        self._definition = daemon.definition()

    def again(self) -> None:
        shutil.rmtree(self.root)
        shutil.copytree(self._kept, self.root)
        self.daemon.put_definition(self._definition)
        self.daemon.put("log", "")

    def calls_of(self, work: Work) -> list[str]:
        """The commands that virsh gets in a run that nothing disturbs."""
        self.again()
        work(self.root)
        return [line.partition(" ")[0] for line in self.daemon.commands()]


def moments(calls: list[str]) -> Iterator[tuple[int, str]]:
    """Before calls, and after the one that changes something."""
    sample = part(range(1, len(calls) + 1), 1)
    for number, command in enumerate(calls, start=1):
        if number in sample or command in CHANGES:
            yield number, "kill-before"
        if command in CHANGES:
            yield number, "kill-after"


def goes_on(daemon: StandIn, root: Path, works: tuple[Work, ...]) -> list[str]:
    """Runs each to its end; gives what was refused."""
    refused = []
    has_earlier = EARLIER in daemon.definition()
    for work in works:
        try:
            work(root)
        except InputError as error:
            refused.append(str(error))
        assert TITLE in daemon.definition(), f"lost by {work} without a word"
        assert EARLIER in daemon.definition() or not has_earlier, f"lost by {work}"
    return refused


def with_devices(definition: bytes) -> bytes:
    devices = PLAIN[PLAIN.index(b"    <hostdev") : PLAIN.index(b"  </devices>")]
    return definition.replace(b"</devices>", devices + b"</devices>")


def with_title(definition: bytes) -> bytes:
    return definition.replace(b"</name>", b"</name>" + TITLE)


def as_printed(definition: bytes) -> bytes:
    """With sizes and sets as libvirt prints them."""
    domain = open_domain(definition, "definition")
    return add_libvirt_parts(domain, domain).to_bytes()


@pytest.mark.parametrize("name", WORK)
def test_no_edit_after_a_kill_at_any_call_is_lost(
    daemon: StandIn, tmp_path: Path, name: str
) -> None:
    before, work = WORK[name]
    start = Start(daemon, tmp_path / "state", before)
    calls = start.calls_of(work)
    assert CHANGES & set(calls) or name == "forget"
    afterwards = itertools.cycle(AFTERWARDS)
    for number, when in moments(calls):
        start.again()
        daemon.happens(number, when)
        assert code_of(start_child(partial(work, start.root))) < 0, "it was to be killed"
        daemon.nothing_happens()
        daemon.put_definition(with_title(daemon.definition()))
        for message in goes_on(daemon, start.root, next(afterwards)):
            assert "was edited after homenode apply" in message or "no saved original" in message


def test_keeping_edits_after_a_kill_at_any_call_ends_with_the_edited_original(
    daemon: StandIn, tmp_path: Path
) -> None:
    _, work = WORK["apply"]
    start = Start(daemon, tmp_path / "state", None)
    for number, when in moments(start.calls_of(work)):
        start.again()
        daemon.happens(number, when)
        code_of(start_child(partial(work, start.root)))
        daemon.nothing_happens()
        entry = DomainStore(start.root, URI, UUID).definition()
        if entry is None:
            assert daemon.definition() == ORIGINAL
            continue
        defined = daemon.definition()
        daemon.put_definition(
            with_title(as_printed(defined) if entry.what is ChangeState.BEGIN else defined)
        )
        would = preview_restore(Virsh(URI), NAME, start.root, keep_edits=True)
        restore(start.root, keep_edits=True)
        assert is_same_definition(daemon.definition(), with_title(ORIGINAL))
        assert is_same_definition(would.original, with_title(ORIGINAL))
        restore(start.root)
        assert TITLE in daemon.definition()


@pytest.mark.parametrize("name", WORK)
def test_an_edit_between_two_calls_is_lost_only_where_libvirt_cannot_be_asked(
    daemon: StandIn, tmp_path: Path, name: str
) -> None:
    before, work = WORK[name]
    start = Start(daemon, tmp_path / "state", before)
    lost = []
    calls = start.calls_of(work)
    for number in dict(moments(calls)):
        start.again()
        daemon.happens(number, "edit")
        with contextlib.suppress(InputError):
            work(start.root)
        daemon.nothing_happens()
        if TITLE in daemon.definition():
            goes_on(daemon, start.root, (restore,))
        else:
            lost.append(calls[number - 1])
    defines = ["define"] if name != "forget" else []
    assert lost == defines, "it replaces whatever is there"


def conflicts(daemon: StandIn, root: Path, before: bytes, after: bytes) -> str:
    """What restore says with --keep-edits to an edit; nothing is changed then."""
    edited = re.sub(before, after, daemon.definition(), count=1, flags=re.DOTALL)
    assert edited != daemon.definition()
    daemon.put_definition(edited)
    with pytest.raises(InputError) as caught:
        restore(root, keep_edits=True)
    assert daemon.definition() == edited
    return str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "place"),
    [
        (rb"vcpupin vcpu='1' cpuset='[^']*'", b"vcpupin vcpu='1' cpuset='9'", "vcpupin[1]/@cpuset"),
        (rb"busNr='[0-9]*'", b"busNr='77'", "busNr"),
        (rb"(cpuset=')[^']*(.*?busNr=')[0-9]*", rb"\g<1>9\g<2>77", "; "),
        (rb"(memnode cellid='1'.*?nodeset=')[^']*", rb"\g<1>7", "memnode[1]/@nodeset"),
    ],
)
def test_an_edit_of_what_the_layout_set_is_a_conflict_by_name(
    daemon: StandIn, tmp_path: Path, before: bytes, after: bytes, place: str
) -> None:
    daemon.put_definition(with_devices(daemon.definition()))
    apply(tmp_path, "pin-numa-pci")
    assert place in conflicts(daemon, tmp_path, before, after)


def test_a_device_on_a_bus_of_the_layout_is_named_before_it_moves(
    daemon: StandIn, tmp_path: Path
) -> None:
    daemon.put_definition(with_devices(daemon.definition()))
    apply(tmp_path, "pin-numa-pci")
    now = daemon.definition()
    bus = re.findall(rb"index='(\d+)' model='pcie-expander-bus'", now)[0]
    nic = b"<interface type='user'><mac address='52:54:00:00:00:01'/><address type='pci' bus='%b'"
    end = b" slot='0x1f'/></interface></devices>"
    daemon.put_definition(now.replace(b"</devices>", nic % bus + end))
    moved = preview_restore(Virsh(URI), NAME, tmp_path, keep_edits=True).moved
    assert moved == ("<interface>[52:54:00:00:00:01]",)


def test_a_domain_that_was_renamed_keeps_its_name(daemon: StandIn, tmp_path: Path) -> None:
    apply(tmp_path, "pin-numa")
    daemon.put("name", "renamed")
    daemon.put_definition(
        daemon.definition().replace(NAME.encode() + b"</name>", b"renamed</name>")
    )
    virsh = Virsh(URI)
    with pytest.raises(InputError) as refused:
        restore_definition(virsh, "renamed", tmp_path)
    assert refused.value.message == (
        f"renamed was {NAME} when homenode applied a layout: it was renamed"
    )
    assert refused.value.hint is not None
    assert f"homenode restore renamed --keep-edits --connect {URI}" in refused.value.hint
    assert f"domrename --domain {UUID} --new-name '{NAME}'" in refused.value.hint
    now = daemon.definition()
    with pytest.raises(InputError, match=r"was renamed\n"):
        apply_definition(virsh, "renamed", now.replace(b"4</vcpu>", b"3</vcpu>"), now, tmp_path)
    daemon.put_definition(now.replace(b"</name>", b"</name><title>mine</title>"))
    with pytest.raises(InputError, match="was renamed and edited"):
        restore_definition(virsh, "renamed", tmp_path)
    daemon.put_definition(now)
    restore_definition(virsh, "renamed", tmp_path, keep_edits=True)
    wanted = ORIGINAL.replace(NAME.encode() + b"</name>", b"renamed</name>")
    assert is_same_definition(daemon.definition(), wanted)
    daemon.put("name", "again")
    daemon.put_definition(wanted.replace(b"renamed</name>", b"again</name>"))
    restore_definition(virsh, "again", tmp_path, keep_edits=True)
    entry = DomainStore(tmp_path, URI, UUID).definition()
    assert entry is not None and entry.facts == {"name": "again", "found": entry.before}
    forget_original(virsh, "again", tmp_path)
    entry = DomainStore(tmp_path, URI, UUID).definition()
    assert entry is not None and entry.facts == {"name": "again"}
    assert entry.what is ChangeState.KEPT


def test_another_domain_of_the_same_name_gets_no_original(
    daemon: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undefined and defined again: libvirt gave it another UUID."""
    apply(tmp_path / "state", "pin-numa")
    uuid = UUID.replace("6e1f", "0000")
    edited = daemon.definition().replace(UUID.encode(), uuid.encode())
    other = StandIn(tmp_path / "other", NAME, edited, uuid)
    monkeypatch.setenv("PATH", f"{other.bin}:/usr/bin:/bin")
    for keep_edits in (False, True):
        with pytest.raises(InputError, match="no saved original") as caught:
            restore(tmp_path / "state", keep_edits=keep_edits)
        assert "another UUID" in (caught.value.hint or "")
    assert other.definition() == edited


def test_an_edit_right_after_an_apply_has_defined_is_reported(
    daemon: StandIn, tmp_path: Path
) -> None:
    start = Start(daemon, tmp_path / "state", None)
    define = start.calls_of(WORK["apply"][1]).index("define") + 1
    start.again()
    assert not apply(start.root, "pin-numa").edited
    start.again()
    daemon.happens(define + 1, "edit")
    daemon.put("drops", "emulatorpin")  # which is no reason to replace the edited definition
    assert apply(start.root, "pin-numa").edited and TITLE in daemon.definition()


def test_a_restore_keeping_edits_goes_on_after_a_kill_without_the_option(
    daemon: StandIn, tmp_path: Path
) -> None:
    before, work = WORK["restore keeping edits"]
    start = Start(daemon, tmp_path / "state", before)
    define = start.calls_of(work).index("define") + 1
    start.again()
    daemon.happens(define, "kill-before")
    code_of(start_child(partial(work, start.root)))
    daemon.nothing_happens()
    restore(start.root)
    expected = ORIGINAL.replace(b"</name>", b"</name>" + EARLIER)
    assert is_same_definition(daemon.definition(), expected)


def test_kept_edits_that_somebody_takes_back_later_stay_away(
    daemon: StandIn, tmp_path: Path
) -> None:
    _, work = WORK["apply"]
    start = Start(daemon, tmp_path / "state", None)
    define = next(number for number, what in moments(start.calls_of(work)) if what == "kill-after")
    start.again()
    daemon.happens(define, "kill-before")
    code_of(start_child(partial(work, start.root)))
    daemon.nothing_happens()
    daemon.put_definition(with_title(ORIGINAL))
    restore(start.root, keep_edits=True)
    daemon.put_definition(ORIGINAL)
    with pytest.raises(InputError):
        restore(start.root)
    assert daemon.definition() == ORIGINAL


def test_edits_of_pins_are_named_once_and_in_short() -> None:
    pins = "".join(f"<vcpupin vcpu='{i}' cpuset='{i}'/>" for i in range(8))
    last = (
        "<domain type='kvm'><name>v</name><memory unit='GiB'>1</memory><vcpu>8</vcpu>"
        f"<cputune>{pins}</cputune></domain>"
    )
    now = last.replace("GiB'>1", "GiB'>2")
    for i in reversed(range(8)):
        now = now.replace(f"cpuset='{i}'", f"cpuset='{i + 8}'")
    error = make_edited_error("v", last.encode(), now.encode(), "")
    assert (
        error.message == "v was edited after homenode apply: memory 1 GiB, now 2 GiB; 1 more edit"
    )
    titled = last.replace("</name>", "</name><title>t</title>")
    pair = ("<memory unit='GiB'>1</memory>", "<vcpu>8</vcpu>")
    moved = last.replace("".join(pair), "".join(reversed(pair)))
    for before, after, edit in (
        (titled, last, "title"),
        (last, moved, "the order of its elements"),
    ):
        message = make_edited_error("v", before.encode(), after.encode(), "").message
        assert message.endswith(f": {edit}")
    now = now.replace("GiB'>2", "GiB'>1")
    assert make_edited_error("v", last.encode(), now.encode(), "").message == (
        "v was edited after homenode apply: pins of vCPUs 0-7, now vCPU 0 on CPU 8, 1 on CPU 9, "
        "2 on CPU 10, 3 on CPU 11, 4 on CPU 12, 5 on CPU 13 and 2 more"
    )
