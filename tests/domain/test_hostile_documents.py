"""Documents with more of anything than a machine can have are refused, with one message."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from homenode.errors import InputError
from homenode.plan.pipeline import plan_file
from homenode.vm.domain.document import (
    MAX_ALIKE,
    MAX_DEVICES,
    MAX_ELEMENTS,
    parse_document,
)
from homenode.vm.domain.read import open_domain
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import shipped_host

HOMENODE = str(Path(sys.executable).with_name("homenode"))
DOCUMENT = (Path(__file__).parents[2] / "demo" / "gpu-vm.xml").read_text()


def within(*around: str) -> Callable[[str], str]:
    """A document with a text in new elements, one in the other, behind <vcpu>."""

    def document(text: str) -> str:
        for name in reversed(around):
            text = f"<{name}>{text}</{name}>"
        return DOCUMENT.replace("</vcpu>", f"</vcpu>{text}", 1)

    return document


def in_devices(text: str) -> str:
    return DOCUMENT.replace("</devices>", f"{text}</devices>", 1)


PCI = "<source><address domain='0' bus='{0}' slot='0' function='0'/></source>"
ELEMENTS = {
    "vcpupin": (within("cputune"), "<vcpupin vcpu='{0}' cpuset='0'/>", MAX_ALIKE),
    "iothreadpin": (within("cputune"), "<iothreadpin iothread='{0}' cpuset='0'/>", MAX_ALIKE),
    "vcpusched": (within("cputune"), "<vcpusched vcpus='{0}' scheduler='fifo'/>", MAX_ALIKE),
    "cachetune": (within("cputune"), "<cachetune vcpus='{0}'/>", MAX_ALIKE),
    "memnode": (within("numatune"), "<memnode cellid='{0}' mode='strict'/>", MAX_ALIKE),
    "cell": (within("cpu", "numa"), "<cell id='{0}' cpus='{0}' memory='1'/>", MAX_ALIKE),
    "vcpu": (within("vcpus"), "<vcpu id='{0}' enabled='yes'/>", MAX_ALIKE),
    "iothread": (within("iothreadids"), "<iothread id='{0}'/>", MAX_ALIKE),
    "page": (within("memoryBacking", "hugepages"), "<page size='{0}'/>", MAX_ALIKE),
    "feature": (within("features"), "<feature name='{0}'/>", MAX_ALIKE),
    "of a foreign name": (within("metadata"), "<a:b xmlns:a='u'/>", MAX_ALIKE),
    "sibling": (within("cpu", "numa"), "<sibling id='{0}' value='10'/>", 16_384),
    "hostdev": (in_devices, f"<hostdev mode='subsystem' type='pci'>{PCI}</hostdev>", MAX_DEVICES),
    "controller": (in_devices, "<controller type='pci' index='{0}'/>", MAX_DEVICES),
    "disk": (in_devices, "<disk type='file'><target dev='vd{0}'/></disk>", MAX_DEVICES),
    "memory": (in_devices, "<memory model='dimm'/>", MAX_DEVICES),
    "of any name": (within(), "<n{0}/>", MAX_ELEMENTS),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_more_than_a_machine_has_is_refused_by_its_number(name: str) -> None:
    document, element, most = ELEMENTS[name]
    text = document("".join(element.format(number) for number in range(most + 1)))
    with pytest.raises(InputError, match=rf"expected at most .*{most}\b.* found more") as refused:
        parse_document(text.encode(), "vm.xml")
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize("command", ["plan", "verify", "doctor"])
def test_100_000_pins_are_one_message(tmp_path: Path, command: str) -> None:
    pins = "".join(f"<vcpupin vcpu='{number}' cpuset='0'/>" for number in range(100_000))
    path = tmp_path / "vm.xml"
    path.write_text(within("cputune")(pins))
    argv = [HOMENODE, command, str(path), "--host", "hgx-h100"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 2
    assert "expected at most 4096 elements <vcpupin>" in done.stderr


@pytest.mark.parametrize("attribute", ["a{0}='1'", "xmlns:a{0}='u{0}'"])
def test_attributes_by_the_thousand_are_refused_before_virsh_compares_them(attribute: str) -> None:
    text = within()("<x " + " ".join(map(attribute.format, range(1000))) + "/>")
    with pytest.raises(InputError, match="expected at most 256 attributes of an element"):
        parse_document(text.encode(), "vm.xml")


def test_a_guest_of_4096_vcpus_with_a_pin_for_each_is_read() -> None:
    pins = "".join(f"<vcpupin vcpu='{number}' cpuset='0'/>" for number in range(4096))
    vcpus = "".join(f"<vcpu id='{number}' enabled='yes'/>" for number in range(4095))
    text = within("cputune")(pins).replace("<cputune>", f"<vcpus>{vcpus}</vcpus><cputune>", 1)
    assert open_domain(text.encode(), "vm.xml").root.child("vcpus") is not None


def test_a_thousand_broken_references_are_a_few_lines() -> None:
    pins = "".join(f"<vcpupin vcpu='{number}' cpuset='0'/>" for number in range(1000))
    document = within("cputune")(pins).encode()
    notes = plan_file(document, "vm.xml", PlanOptions(layout="pin"), shipped_host("hgx-h100")).notes
    assert len([one for one in notes if "pin-of-no-vcpu" in one]) == 9
    assert any("904 more of this kind (pin-of-no-vcpu)" in one for one in notes)
