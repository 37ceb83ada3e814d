"""Random VMs on random hosts: whatever the hook is given, it loses nothing and adds no error.

HOMENODE_FUZZ is how many are tried; 50 where it is not set.
"""

import json
import os
import random
from collections import Counter
from xml.etree import ElementTree

from homenode.cluster.arguments import OnError
from homenode.cluster.kubevirt.placing import DomainAnswer, answer, place_devices
from homenode.errors import HomenodeError
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.vm.domain.edits import Edit, apply, remove, set_attribute
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.domain.schema import validate
from homenode.vm.plan_options import PciGranularity
from tests.kubevirt_documents import defined_again, document, small_host, vmi

COUNT = int(os.environ.get("HOMENODE_FUZZ", "50"))
NATIVE = (
    '<controller type="pci" index="1" model="pcie-expander-bus"><model name="pxb-pcie"/>'
    '<target busNr="{bus_nr}"><node>0</node></target>'
    '<address type="pci" domain="0x0000" bus="0x00" slot="0x08" function="0x0"/></controller>'
    '<controller type="pci" index="2" model="pcie-root-port">'
    '<address type="pci" domain="0x0000" bus="0x01" slot="0x00" function="0x0"/></controller>'
)
CHANGEABLE = (("hostdev", "address"), ("controller", "address"), ("controller", "target"))
ODD_LINES = ("-1", "odd", "9" * 30, "0-99999999999", "0x", "0,0", "\u0661", "nan", "0-3,", "5-1")
ODD_FILES = ("", "\0", "10 10 10 10 10 10 10\n", *(f"{line}\n" for line in ODD_LINES))
ODD_LINKS = ("../../../devices/pci0000:00/x", "/etc/passwd", "", "../" * 30)
ODD_JSON: tuple[object, ...] = (None, 7, -1, "x", [], {}, [[]], True, 1e400, "\ud800")
ODD_VALUES = ("", "-1", "0", "255", "256", "0xff", "pcie-expander-bus", "0-99999999", "9" * 30)


def a_case(rng: random.Random) -> tuple[str, MemorySnapshot, PciGranularity]:
    """A VM that libvirt would take, on a host that has its devices."""
    nodes = rng.randint(1, 4)
    each = rng.randint(1, 4)
    pus = [f"{node * 8}-{node * 8 + 7}" for node in range(nodes)]
    far = rng.choice((11, 20, 21, 32, 255))
    rows = [" ".join("10" if a == b else str(far) for b in range(nodes)) for a in range(nodes)]
    buses = rng.sample(range(1, 200), rng.randint(1, 12))
    devices = {f"{bus:02x}:00.0": rng.randint(-1, nodes - 1) for bus in buses}
    if rng.random() < 0.3:
        first = next(iter(devices))
        devices[first[:-1] + "1"] = devices[first]
    chosen = rng.sample(range(nodes), rng.randint(1, nodes))
    owned = rng.sample(sorted(devices), rng.randint(1, len(devices)))
    addresses = {}
    controllers = ""
    kind = rng.random()
    if kind < 0.2:
        addresses[owned[0]] = 'domain="0x0000" bus="0x00" slot="0x07" function="0x0"'
    elif kind < 0.4:
        controllers = NATIVE.format(bus_nr=rng.choice((100, 200, 253)))
        addresses[owned[0]] = 'domain="0x0000" bus="0x02" slot="0x00" function="0x0"'
    elif kind < 0.5:
        index = rng.choice((1, 3, 100, 200))
        controllers = f'<controller type="pci" index="{index}" model="pcie-root-port"/>'
    xml = document(
        owned,
        pins=[[node * 8 + i for i in range(each)] for node in chosen] if rng.random() < 0.9 else (),
        nodes=[str(node) for node in chosen] if rng.random() < 0.7 else None,
        addresses=addresses,
        controllers=controllers,
        distances=rng.random() < 0.3,
        memory_bytes=len(chosen) << 30,
    )
    return xml, small_host(devices, pus, rows), rng.choice(list(PciGranularity))


def damaged(xml: str, rng: random.Random) -> str:
    """The same with an element removed, doubled, or given an odd value."""
    opened = open_domain(xml.encode(), "fuzz")
    element = rng.choice(list(opened.root.walk())[1:])
    kind = rng.randrange(3)
    if kind == 0:
        edits = remove(opened, element)
    elif kind == 1:
        edits = [Edit(element.end, element.end, opened.text[element.start : element.end])]
    else:
        names = [name for name, _ in element.attributes] or ["index"]
        edits = set_attribute(opened, element, rng.choice(names), rng.choice(ODD_VALUES))
    return apply(opened, edits).to_bytes().decode()


def damaged_host(host: MemorySnapshot, rng: random.Random) -> MemorySnapshot:
    """The same with files gone, garbled or leading elsewhere."""
    files, links = dict(host.files), dict(host.links)
    for path in rng.sample(sorted(files), min(len(files), 3)):
        if rng.random() < 0.3:
            del files[path]
        else:
            files[path] = rng.choice(ODD_FILES)
    if rng.random() < 0.2:
        links[rng.choice(sorted(links))] = rng.choice(ODD_LINKS)
    return MemorySnapshot(host.name, files, links)


def damaged_vmi(rng: random.Random) -> str:
    """A VMI with one value that is something else."""
    whole = json.loads(vmi(annotations={"homenode/pci-granularity": "cell"}))
    at, key = whole, "spec"
    while isinstance(at[key], dict) and at[key] and rng.random() < 0.8:
        at = at[key]
        key = rng.choice(sorted(at))
    at[key] = rng.choice(ODD_JSON)
    return json.dumps(whole)


def hooked(
    text: str, xml: str, host: MemorySnapshot, policy: OnError | None = None
) -> DomainAnswer:
    return answer(text, xml.encode(), lambda: host, on_error=policy)


def kept(xml: bytes) -> Counter[tuple[object, ...]]:
    """Every element with its path, attributes and text; of what the hook may change, the path."""
    found: Counter[tuple[object, ...]] = Counter()

    def walk(element: ElementTree.Element, path: tuple[str, ...]) -> None:
        here = (*path, element.tag)
        ours = here[2:] in CHANGEABLE
        shown = () if ours else (tuple(sorted(element.items())), (element.text or "").strip())
        found[(here, *shown)] += 1
        for child in element:
            walk(child, here)

    walk(ElementTree.fromstring(xml), ())
    return found


def valid(xml: bytes) -> bytes:
    return xml.replace(b'<source><address type="pci" ', b"<source><address ")


def test_random_vms_lose_nothing_gain_no_error_and_keep_their_places_when_defined_again() -> None:
    placed = defined = 0
    for seed in range(COUNT):
        xml, host, granularity = a_case(random.Random(seed))
        once = place_devices(xml.encode(), host, granularity=granularity).document
        again = place_devices(once, host, granularity=granularity).document
        assert again == once, f"seed {seed}: not the same the second time"
        assert not kept(xml.encode()) - kept(once), f"seed {seed}: something is lost"
        if once != xml.encode():
            placed += 1
            errors, gap = validate(valid(once))
            assert gap is not None or not errors, f"seed {seed}: {errors[:1]}"
        if "pxb-pcie" in xml:  # KubeVirt's own: its types do not lose what they make
            continue
        defined += once != xml.encode()
        between = defined_again(xml, once.decode())
        again = place_devices(between.encode(), host, granularity=granularity).document
        first, second = (build_vm(open_domain(text, "fuzz")) for text in (once, again))
        assert second.controllers == first.controllers, f"seed {seed}"
        assert second.hostdevs == first.hostdevs, f"seed {seed}"
    assert placed > COUNT // 3 and defined > COUNT // 3


def test_damaged_vms_are_placed_whole_or_refused_in_words() -> None:
    refused = 0
    for seed in range(COUNT):
        rng = random.Random(seed)
        xml, host, granularity = a_case(rng)
        broken = damaged(xml, rng).encode()
        try:
            once = place_devices(broken, host, granularity=granularity).document
        except HomenodeError as error:
            words = ("expected", "missing", "no such", "unknown", "out of range")
            assert any(word in str(error) for word in words), f"seed {seed}: {error}"
            refused += 1
            continue
        assert not kept(broken) - kept(once), f"seed {seed}: something is lost"
    assert refused


def test_whatever_sys_and_the_vmi_say_the_policy_is_obeyed() -> None:
    codes: Counter[int] = Counter()
    for seed in range(COUNT):
        rng = random.Random(seed)
        xml, host, _ = a_case(rng)
        broken = damaged_host(host, rng)
        text = damaged_vmi(rng) if rng.random() < 0.5 else vmi()
        failed = hooked(text, xml, broken)
        codes[failed.exit_code] += 1
        assert (failed.document is None) is (failed.exit_code != 0), f"seed {seed}"
        if failed.exit_code:
            passed = hooked(text, xml, broken, OnError.PASSTHROUGH)
            assert (passed.document, passed.exit_code) == (xml.encode(), 0), f"seed {seed}"
    assert codes[0] and codes[2] and codes[3]
