"""A trial before its first boot: what fits, the order of boots, and its journal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from homenode import formats
from homenode.errors import InputError, UsageError
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import RunningDomain
from homenode.measure.trial.fitting import fit
from homenode.measure.trial.journal import (
    KIND,
    EntryKind,
    TrialEntry,
    TrialHead,
    schedule_trial,
    summarize_entries,
)
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.apply_documents import NAME, ORIGINAL
from tests.simulated_trial import LAYOUTS
from tests.virsh_stand_in import URI


def test_a_device_that_another_vm_has_stops_every_layout() -> None:
    there = load_host("small-2n8c-2gpu")
    gpu = there.devices_of_kind(DeviceKind.GPU)[0].bdf
    hostdev = (
        f"<hostdev mode='subsystem' type='pci' managed='yes'><source><address bus='{gpu.bus}' "
        f"domain='{gpu.domain}' slot='{gpu.device}' function='{gpu.function}'/></source></hostdev>"
        "</devices>"
    )
    original = ORIGINAL.replace(b"</devices>", hostdev.encode())
    options = PlanOptions(layout="pin")
    assert not any(one.against for one in fit(original, NAME, options, LAYOUTS, there))
    other = RunningDomain("other", True, (None,), None, (), 1 << 30, False, (), None, (gpu,))
    in_use = replace(there, domains=(other,))
    found = fit(original, NAME, options, LAYOUTS, in_use)
    assert all("device-in-use" in one.against[0] or one.tuning is None for one in found)
    assert all(one.against for one in found)
    # Its own devices are not in its way.
    mine = replace(there, domains=(replace(other, name=NAME),))
    assert not any(one.against for one in fit(original, NAME, options, LAYOUTS, mine))


@given(
    st.lists(
        st.sampled_from(["default", "pin", "pin-numa", "pin-numa-pci"]), unique=True, min_size=1
    ),
    st.integers(1, 8),
    st.integers(0, 1000),
)
def test_each_round_boots_each_layout_once(layouts: list[str], boots: int, seed: int) -> None:
    steps = schedule_trial(layouts, boots, seed)
    assert steps == schedule_trial(layouts, boots, seed)
    assert [step.number for step in steps] == list(range(len(layouts) * boots))
    for number in range(boots):
        of_round = [step for step in steps if step.round == number]
        assert {step.variant for step in of_round} == set(layouts)
        assert [step.number // len(layouts) for step in of_round] == [number] * len(layouts)


def test_layouts_do_not_stand_in_one_order_every_round() -> None:
    steps = schedule_trial(LAYOUTS, 20, 1)
    orders = {tuple(s.variant for s in steps if s.round == number) for number in range(20)}
    assert len(orders) > 3


@pytest.mark.parametrize("bad", [[], ["pin", "pin"]])
def test_a_layout_twice_or_none_is_refused(bad: list[str]) -> None:
    with pytest.raises(UsageError, match="--layouts"):
        schedule_trial(bad, 1, 1)


_ENTRIES = st.lists(
    st.builds(
        TrialEntry,
        at=st.just("2026-01-01T00:00:00Z"),
        what=st.sampled_from(EntryKind),
        number=st.integers(0, 5) | st.none(),
        detail=st.text(max_size=5),
        samples=st.integers(0, 9) | st.none(),
    ),
    max_size=12,
)


_HEAD = TrialHead("t", URI, "vm", "u", "vm", ("pin",), 1, 1, "/r")


def decoded(content: bytes) -> tuple[TrialHead, tuple[TrialEntry, ...]]:
    return formats.decode_journal(content, KIND, TrialHead, TrialEntry, "journal")


@given(_ENTRIES, st.integers(0, 5000))
def test_a_cut_journal_is_read_to_its_last_line(entries: list[TrialEntry], cut: int) -> None:
    first_line = formats.read_head_line(KIND, _HEAD).encode()
    whole = first_line + "".join(map(formats.line, entries)).encode()
    head, read = decoded(whole)
    assert (head, list(read)) == (_HEAD, entries)
    first = len(first_line)
    part = whole[: max(first, min(cut, len(whole)))]
    _, read = decoded(part)
    assert list(read) == entries[: len(read)]
    assert part.count(b"\n") == len(read) + 1
    summarize_entries(read)


@pytest.mark.parametrize(
    "text", [b"", b"\n", b"[]\n", b'{"format":"homenode.trial/9"}\n', b"\xff\n"]
)
def test_what_is_no_journal_is_refused_by_name(text: bytes) -> None:
    with pytest.raises(InputError, match="journal"):
        decoded(text)
