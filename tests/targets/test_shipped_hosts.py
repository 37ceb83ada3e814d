"""For every preset and shipped host: a file that says the plan, or a refusal with a reason."""

from itertools import product

import pytest
from msgspec.structs import replace

from homenode.check.verify.target_file import verify_target
from homenode.errors import InputError
from homenode.findings import Severity
from homenode.machine.description.parse import shipped_hosts
from homenode.machine.pci import DeviceKind
from homenode.plan.pipeline import plan_for_target, vm_of_options
from homenode.vm.layout import PRESETS
from homenode.vm.targets.registry import TARGETS, read_vm, target_named
from homenode.vm.targets.target import Feature, Level, features_of, lost_features, target_findings
from tests.targets.examples import EXAMPLES
from tests.targets.written import again, host_named, options, rendered, written

LARGE = ("x86-2p8n128c256t-64gpu",)
"""Hosts that are planned with one layout here, and with every one in the lab."""

TWICE = {"x86-2p2n16c32t-isolated-pus", "small-2n8c-2gpu", "gh200x4"}
"""Hosts on which the file that came of a plan is planned again."""


@pytest.mark.parametrize("name", shipped_hosts())
def test_a_plan_becomes_a_file_that_says_it_or_a_refusal(name: str) -> None:
    become_files(name, ("pin-numa-pci",) if name in LARGE else tuple(PRESETS))


@pytest.mark.lab
@pytest.mark.parametrize("name", LARGE)
def test_every_layout_of_a_large_host_becomes_a_file_or_a_refusal(name: str) -> None:
    become_files(name, tuple(PRESETS))


def become_files(name: str, layouts: tuple[str, ...]) -> None:
    host = host_named(name)
    gpus = min(len(host.devices_of_kind(DeviceKind.GPU)), 2) or None
    for layout, target in product(layouts, TARGETS):
        wanted = options(layout, gpu_count=gpus)
        try:
            planned = rendered(target, name, wanted)
        except InputError as refusal:
            reasons = EXAMPLES[target].refused_for
            assert any(reason in refusal.message for reason in reasons), refusal.message
            continue
        content = planned.rendering.document
        assert read_vm(content, "vm").kind == target
        hook = dict(planned.rendering.companions).get(".hook.sh")
        found = verify_target(content, "vm", target, planned.plan, host=host, hook=hook).findings
        assert [f for f in found if f.severity is not Severity.INFO] == [], (layout, found)
        if name in TWICE:
            once = again(content, name, wanted)
            assert once.rendering.document == content, (target, layout)


def test_more_vcpus_than_the_machine_type_takes_are_refused_or_said() -> None:
    name = "epyc9654-2p-1node"
    many = options("pin-numa-smt", vcpus=300)
    assert "vcpu-limit-unknown" in {found.id for found in written("qemu", name, many).findings}
    host = host_named(name)
    old = replace(host, settings=replace(host.settings, qemu_version=(7, 2, 0)))
    with pytest.raises(InputError, match="at most 288 vCPUs"):
        plan_for_target(vm_of_options(many, "x86_64"), many, old, "qemu")


def test_every_target_says_of_every_feature_how_far_it_goes() -> None:
    for name in TARGETS:
        support = target_named(name).support
        assert set(support) == set(Feature)
        for feature, one in support.items():
            assert (one.loses is None) == (one.level is Level.NATIVE), (name, feature)


@pytest.mark.parametrize("target", TARGETS)
def test_each_loss_of_a_plan_is_a_finding_and_nothing_else_is(target: str) -> None:
    made = written("qemu", "x86-2p2n16c32t-isolated-pus", options("pin-numa-smt")).plan
    module = target_named(target)
    found = target_findings(module, made)
    asked = features_of(made)
    assert sum(f.id == "target-lost" for f in found) == len(lost_features(module, made))
    assert len(found) == sum(module.support[f].level is not Level.NATIVE for f in asked)
