"""Redaction: what is planted in any source never survives; topology stays as it was."""

import ipaddress
import re

import pytest

from homenode.bdf import Bdf
from homenode.machine.snapshot.contents import COMMANDS, IDENTITY_PATHS, PATHS, PathKind, TextForm
from homenode.machine.snapshot.gather import gather
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.machine.snapshot.pseudonyms import Pseudonyms
from homenode.machine.snapshot.redact import (
    Identities,
    read_identities,
    redact,
    redact_command_line,
)
from homenode.machine.tools.lspci import parse as parse_lspci
from homenode.machine.tools.nvidia_smi import parse_topology
from tests.shared_data import needs_shared, shared

SECRETS = {
    "uuid": "7b41c0de-93fa-4d1c-8e77-0123456789ab",
    "gpu uuid": "GPU-5e8d2f10-aaaa-bbbb-cccc-d00d00d00d01",
    "mac": "3c:6a:48:1f:22:e3",
    "MAC": "3C-6A-48-1F-22-E4",
    "eui64": "b8-ce-f6-03-00-12-34-56",
    "guid": "b8ce:f603:0012:3457",
    "ipv4": "10.20.30.41",
    "ipv6": "fd12:3456:789a::5",
    "host": "gpu7.acme.example",
    "host alone": "gpu7",
    "user": "jdoe",
    "mail": "j.doe@acme.example",
    "home": "/home/jdoe2/vms",
    "machine id": "0123456789abcdef0123456789abcdef",
}
SERIAL = "1654921000123"  # told by nvidia-smi, planted everywhere
IDENTITIES = Identities(("gpu7.acme.example",), ("jdoe",))

NVIDIA_QUERY = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <timestamp>Mon Jan  1 00:00:00 2026 {plant}</timestamp>
  <driver_version>550.54.15</driver_version>
  <gpu id="00000000:3B:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <serial>1654921000123</serial><uuid>GPU-5e8d2f10-aaaa-bbbb-cccc-d00d00d00d01</uuid>
    <platformInfo><chassis_serial_number>CHASSIS77</chassis_serial_number>
      <module_id>3</module_id></platformInfo>
    <pci><pci_bus_id>00000000:3B:00.0</pci_bus_id><note>{plant}</note></pci>
    <processes><process_info><name>{plant} secret-job</name></process_info></processes>
    <new_element_of_next_year>{plant} unheard-of</new_element_of_next_year>
  </gpu>
</nvidia_smi_log>
"""
DOMAINS = """<domains>
<domain type='kvm' id='4' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>customer-vm</name><uuid>7b41c0de-93fa-4d1c-8e77-0123456789ab</uuid>
  <title>{plant} our title</title><description>{plant} our words</description>
  <metadata><owner>{plant} our owner</owner></metadata>
  <memory unit='KiB'>1048576</memory><vcpu placement='static'>2</vcpu>
  <cputune><vcpupin vcpu='0' cpuset='2'/><vcpupin vcpu='1' cpuset='3'/></cputune>
  <numatune><memory mode='strict' nodeset='1'/></numatune>
  <sysinfo type='smbios'><system><entry name='serial'>SYS-{plant}</entry></system></sysinfo>
  <os><type arch='x86_64' machine='q35'>hvm</type>
    <loader readonly='yes' type='pflash'>/srv/our-firmware.fd</loader>
    <nvram>/srv/our-nvram.fd</nvram><cmdline>password=hunter2</cmdline></os>
  <devices><emulator>/srv/our/qemu</emulator>
    <disk type='file' device='disk'><source file='/srv/our-disk.qcow2'><note>{plant}</note></source>
      <target dev='vda' bus='virtio'/><serial>DISK{plant}</serial><wwn>5000c50015ea71ac</wwn></disk>
    <interface type='bridge'><mac address='3c:6a:48:1f:22:e3'/><source bridge='our-bridge'/>
      <target dev='tap-customer'/><address type='pci' bus='0x03' slot='0x00'/></interface>
    <hostdev mode='subsystem' type='pci' managed='yes'><source>
      <address domain='0x0000' bus='0x3b' slot='0x00' function='0x0'/></source></hostdev>
    <graphics type='vnc' listen='10.20.30.41' passwd='hunter2'/>
    <memory model='nvdimm'><source><path>/srv/our-nvdimm</path></source>
      <target><size unit='KiB'>524288</size><node>1</node></target></memory>
  </devices>
  <seclabel type='dynamic'><label>libvirt-{plant}</label></seclabel>
  <qemu:commandline><qemu:arg value='hunter2 {plant}'/></qemu:commandline>
</domain>
</domains>
"""
CAPABILITIES = """<capabilities><host><uuid>7b41c0de-93fa-4d1c-8e77-0123456789ab</uuid>
  <topology><cells num='1'><cell id='0'><cpus num='1'><cpu id='0' socket_id='0' core_id='0'
    siblings='0'/></cpus></cell></cells></topology>
  <secmodel><model>dac</model><baselabel type='kvm'>{plant}</baselabel></secmodel></host>
</capabilities>
"""
LSPCI = """0000:3b:00.0 Ethernet controller [0200]: Mellanox MT2910 [15b3:1021]
\tSubsystem: {plant}
\tNUMA node: 1
\tRegion 0: Memory at 39bffe000000 (64-bit, prefetchable) [size=32M]
\tCapabilities: [48] Vital Product Data
\t\tProduct Name: ConnectX-7
\t\tRead-only fields:
\t\t\t[PN] Part number: MCX75310AAS-NEAT
\t\t\t[SN] Serial number: MT2311X12345
\t\t\t[V3] Vendor specific: our-vendor-words
\t\tRead/write fields:
\t\t\t[YA] Asset tag: our-asset
\tCapabilities: [180 v1] Device Serial Number b8-ce-f6-03-00-12-34-56
\tKernel driver in use: mlx5_core
"""
STRUCTURED = {
    "nvidia-smi-query": NVIDIA_QUERY,
    "virsh-domains": DOMAINS,
    "virsh-capabilities": CAPABILITIES,
    "lspci": LSPCI,
}


def _plant(text: str, secret: str) -> str:
    return text.replace("{plant}", f"x {secret} y")


def _example(glob: str) -> str:
    """A path of a glob: its patterns with 0 for what varies."""
    path = (
        glob.replace("[0-9]*", "0").replace("[01]", "0").replace("hugepages-*kB", "hugepages-4kB")
    )
    return path.replace("devices/*", "devices/0000:3b:00.0").replace("*", "0")


def _redacted(tool: str, output: str, identities: Identities = IDENTITIES) -> str:
    """The output of a tool, redacted."""
    snapshot = MemorySnapshot("h", {}, {}, {tool: output})
    return redact(snapshot, identities).snapshot.commands[tool]


def _texts(snapshot: MemorySnapshot) -> str:
    parts = [*snapshot.files.values(), *snapshot.links.values(), *snapshot.commands.values()]
    return "\n".join((*parts, *snapshot.directories))


def _planted(secret: str, where: TextForm | None = None) -> MemorySnapshot:
    """A host with a secret in every path and every command of the table."""
    files = {}
    links = {}
    for rule in PATHS:
        path = _example(rule.glob)
        if rule.kind is PathKind.LINK:
            links[path] = f"../{secret}"
        elif rule.kind is PathKind.FILE:
            key = rule.keep[0] if rule.keep else "key"
            text = f"{key}\t: x {secret} y\n" if rule.form is TextForm.FIELDS else f"{secret}\n"
            files[path] = text
    commands = {
        command.name: _plant(STRUCTURED.get(command.name, "GPU 0: {plant}\n"), secret)
        for command in COMMANDS
    }
    return MemorySnapshot("planted", files, links, commands)


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_planted_in_every_source_survives_in_none(name: str) -> None:
    secret = SECRETS[name]
    gathered = gather(_planted(secret))
    left = _texts(redact(gathered.snapshot, IDENTITIES).snapshot)
    for form in {secret, secret.lower(), secret.removeprefix("GPU-"), secret.partition(".")[0]}:
        if name not in ("ipv4", "home") or form == secret:
            assert form not in left, form
    if name == "home":
        assert "jdoe2" not in left


def test_a_serial_that_one_tool_tells_is_found_in_all_others() -> None:
    snapshot = MemorySnapshot(
        "host",
        {"/sys/devices/virtual/dmi/id/product_name": f"Server {SERIAL}\n"},
        {},
        {"nvidia-smi-query": NVIDIA_QUERY, "nvidia-smi-topo": f"GPU0 {SERIAL}\n"},
    )
    redacted = redact(snapshot, Identities()).snapshot
    assert SERIAL not in _texts(redacted)
    assert redacted.read_text("/sys/devices/virtual/dmi/id/product_name") == "Server serial-1\n"


def test_what_is_free_in_a_tools_document_does_not_survive() -> None:
    redacted = _texts(redact(_planted("PLANTED"), IDENTITIES).snapshot)
    words = "hunter2 customer our- /srv/ CHASSIS77 secret-job unheard-of SYS- DISK svirt".split()
    words += ["our title", "our words", "our owner", "5000c50015ea71ac", "MT2311X12345"]
    assert not [word for word in words if word in redacted]


def test_the_structure_of_a_tools_document_survives() -> None:
    commands = redact(_planted("PLANTED"), IDENTITIES).snapshot.commands
    domains = commands["virsh-domains"]
    for part in (
        'type="kvm" id="4"',
        "<name>redacted/vm-1</name>",
        '<vcpupin vcpu="1" cpuset="3"/>',
        '<memory mode="strict" nodeset="1"/>',
        '<memory unit="KiB">1048576</memory>',
        '<address domain="0x0000" bus="0x3b" slot="0x00" function="0x0"/>',
        "<node>1</node>",
        "<emulator>/usr/bin/redacted</emulator>",
    ):
        assert part in domains, part
    assert '<gpu id="00000000:3B:00.0">' in commands["nvidia-smi-query"]
    assert "<module_id>3</module_id>" in commands["nvidia-smi-query"]
    assert "siblings=" in commands["virsh-capabilities"]
    lspci = commands["lspci"]
    assert "[PN] Part number: redacted" in lspci
    assert "MCX75310AAS" not in lspci
    assert "Memory at 39bffe000000 (64-bit, prefetchable) [size=32M]" in lspci
    assert re.search(r"Device Serial Number 02(-[0-9a-f]{2}){7}$", lspci, re.MULTILINE)


def test_pseudonyms_are_the_same_everywhere_and_well_formed() -> None:
    names = Pseudonyms(["gpu7"], ["jdoe"])
    first = names.scrub(" ".join(SECRETS.values()))
    assert names.scrub(" ".join(SECRETS.values())) == first
    assert names.scrub(SECRETS["mac"].upper()) == names.scrub(SECRETS["mac"])
    mac = names.scrub(SECRETS["mac"])
    assert re.fullmatch(r"02(:[0-9a-f]{2}){5}", mac)
    assert int(mac[:2], 16) & 0b11 == 0b10  # locally administered, unicast
    uuid = names.scrub(SECRETS["gpu uuid"])
    assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid)
    for version, network in (("ipv4", "192.0.2.0/24"), ("ipv6", "2001:db8::/32")):
        address = ipaddress.ip_address(names.scrub(SECRETS[version]))
        assert address in ipaddress.ip_network(network)
    assert names.scrub("00000000-0000-4000-8000-000000000009") != names.scrub(SECRETS["uuid"])


def test_a_secret_has_one_pseudonym_in_all_sources() -> None:
    """Files, links' paths, lines of text, elements and attributes of XML."""
    snapshot = _planted(f"{SECRETS['uuid']} {SECRETS['mac']} gpu7")
    redacted = redact(snapshot, IDENTITIES).snapshot
    text = "\n".join((*redacted.files.values(), *redacted.commands.values()))
    assert "host-1" in text and "host-2" not in text
    uuids = set(re.findall(r"[0-9a-f]{8}-0000-4000-8000-[0-9a-f]{12}", text))
    # The planted one, which is also the domain's and the host's, and the GPU's.
    assert len(uuids) == 2
    assert len(set(re.findall(r"02(?::[0-9a-f]{2}){5}\b", text))) == 1


def test_many_addresses_stay_distinct() -> None:
    names = Pseudonyms()
    addresses = [f"10.0.{i // 256}.{i % 256}" for i in range(2000)]
    assert len({names.scrub(address) for address in addresses}) == 2000
    macs = [f"3c:6a:48:00:{i // 256:02x}:{i % 256:02x}" for i in range(2000)]
    assert len({names.scrub(mac) for mac in macs}) == 2000


@pytest.mark.parametrize(
    "text",
    [
        "0000:3b:00.0 10000:e1:00.0 00000000:3B:00.0 3b:00.0",
        "0-31,64-95 0,2,4-6 00-11",
        "ffffffff,ffffffff,00000000 0x000000ff,,0x0",
        "10 21 31 41",
        "0x0000022000000000 0x000002203fffffff 0x000000000014220c",
        "32.0 GT/s PCIe",
        "580.105.08 96.00.99.00.01 9.0.0 6.8.0-41-generic 1:7.2+dfsg-7+deb12u18",
        "HeaderLog: 04000001 0000200f 19070000 f7c2a5b0",
        "Bus: primary=00, secondary=3b, subordinate=3f, sec-latency=0",
        "pci0000:17/0000:17:01.0/0000:18:00.0",
        "127.0.0.1 ::1 0.0.0.0 ::",
        "GPU0\t X \tNV18\tSYS\t0-63,128-191\t0,5-11\t\t4",
        "root host gpu node numa",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    names = Pseudonyms(["gpu", "localhost", "node"], ["root", "ab"])
    assert names.scrub(text) == text


def test_every_bdf_stays() -> None:
    names = Pseudonyms()
    for bus in range(256):
        text = str(Bdf(0, bus, bus % 32, bus % 8))
        assert names.scrub(f"x {text} {text}:pcie001") == f"x {text} {text}:pcie001"


def test_a_command_line_keeps_what_bears_on_placement() -> None:
    line = (
        "BOOT_IMAGE=/boot/vmlinuz-6.8 root=UUID=7b41c0de-93fa-4d1c-8e77-0123456789ab ro quiet "
        "ip=10.0.0.2::10.0.0.1:255.255.255.0:gpu7 rd.luks.key=/key password=hunter2 hunter3 "
        "isolcpus=managed_irq,2-31 nohz_full=2-31 default_hugepagesz=1G hugepagesz=1G "
        'hugepages=0:400,1:400 intel_iommu=on iommu=pt vfio-pci.ids=10de:2330 dyndbg="file a +p" '
        "mitigations=auto;hunter4$(x)"
    )
    kept = redact_command_line(line, Pseudonyms())
    assert kept.replace("redacted ", "") == (
        "ro quiet isolcpus=managed_irq,2-31 nohz_full=2-31 default_hugepagesz=1G hugepagesz=1G "
        "hugepages=0:400,1:400 intel_iommu=on iommu=pt vfio-pci.ids=10de:2330 redacted"
    )


@pytest.mark.parametrize(
    ("token", "kept"),
    [
        ("nvidia.NVreg_Words=acme-hsm-7", "nvidia.NVreg_Words=redacted-redacted-7"),
        ("rd.driver.pre=vfio-pci,acme_hsm", "rd.driver.pre=vfio-pci,redacted"),
        ("module_blacklist=nouveau,customer1", "module_blacklist=nouveau,redacted"),
        ("vfio-pci.ids=10de:2330,10de:22a3", "vfio-pci.ids=10de:2330,10de:22a3"),
        ("kvm.secret=deadbeefcafe1234", "kvm.secret=redacted"),
        ("pcie_aspm.policy=performance", "pcie_aspm.policy=performance"),
        ("pci=realloc=off,nocrs", "pci=realloc=off,nocrs"),
        ("isolcpus=domain,managed_irq,2-31,34:1/2", "isolcpus=domain,managed_irq,2-31,34:1/2"),
        ("idle=poll", "idle=poll"),
        ("mem=512G", "mem=512G"),
        ("ro", "ro"),
    ],
)
def test_free_words_of_a_kernel_parameters_value_go(token: str, kept: str) -> None:
    assert redact_command_line(token, Pseudonyms()) == kept


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("PowerEdge XE9680\n", "PowerEdge XE9680\n"),
        ("AS -8125GS-TNHR\n", "AS -8125GS-TNHR\n"),
        ("DGXH100\n", "DGXH100\n"),
        ("ThinkSystem SR675 V3\n", "ThinkSystem SR675 V3\n"),
        ("R282-Z93-00\n", "R282-Z93-00\n"),
        ("Rack 12 node, Serial No: AB-1\n", "Rack 12 node, redacted\n"),
        ("ProLiant DL380 CZ3049XY71\n", "ProLiant DL380 serial-1\n"),
        ("Server 1234567890123\n", "Server serial-1\n"),
        ("Box MY-OWN-TAG-7\n", "Box serial-1\n"),  # of chassis_asset_tag
    ],
)
def test_a_serial_goes_from_the_name_of_a_machine(name: str, kept: str) -> None:
    path = "/sys/devices/virtual/dmi/id/product_name"
    files = {path: name, "/sys/devices/virtual/dmi/id/chassis_asset_tag": "MY-OWN-TAG-7\n"}
    snapshot = MemorySnapshot("h", files, {}, {})
    identities = read_identities(snapshot)
    assert identities.serials == ("MY-OWN-TAG-7",)
    only = MemorySnapshot("h", {path: name}, {}, {})
    shown = redact(only, identities).snapshot.files[path]
    assert shown.replace("serial-2", "serial-1") == kept


def test_a_slots_own_label_goes_and_its_number_stays() -> None:
    text = LSPCI.replace("\tNUMA node: 1\n", "\tNUMA node: 1\n\tPhysical Slot: ACME-rack7\n")
    text = text.replace("\tSubsystem", "\tDeviceName: acme-storage-2\n\tSubsystem")
    kept = _redacted("lspci", text)
    assert "Physical Slot: slot-2\n" in kept and "acme" not in kept.lower()
    numbered = _redacted("lspci", text.replace("ACME-rack7", "802-1"))
    assert "Physical Slot: 802-1\n" in numbered


def test_output_that_does_not_parse_is_left_out_and_said() -> None:
    snapshot = MemorySnapshot("host", {}, {}, {"virsh-domains": "<domains><domain>jdoe"})
    result = redact(snapshot, IDENTITIES)
    assert not result.snapshot.commands
    assert result.omitted[0][0] == "virsh-domains"
    assert "jdoe" not in result.omitted[0][1]


def test_notes_are_redacted_too() -> None:
    mediated = "/sys/bus/mdev/devices/{}"
    notes = (
        ("virsh-capabilities", "virsh: cannot reach gpu7 as jdoe"),
        (mediated.format("83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"), "not of its form"),
    )
    result = redact(MemorySnapshot("host", {}), IDENTITIES, notes)
    assert result.omitted == (
        ("virsh-capabilities", "virsh: cannot reach host-1 as user-1"),
        (mediated.format("00000000-0000-4000-8000-000000000001"), "not of its form"),
    )


def test_a_host_named_like_a_gpu_leaves_the_gpus_their_names() -> None:
    names = Pseudonyms(["gpu7", "node1"])
    assert names.scrub("GPU7 on gpu7, Gpu7") == "GPU7 on host-1, host-1"
    assert names.scrub_forms("/sys/devices/system/node/node1") == "/sys/devices/system/node/node1"


def test_paths_and_links_that_hold_a_guid_still_meet() -> None:
    """Hyper-V puts the GUID of a device into its path."""
    bus = "/sys/devices/LNXSYSTM:00/VMBUS:00/7b41c0de-93fa-4d1c-8e77-0123456789ab/pci9a3c:00"
    link = "/sys/bus/pci/devices/9a3c:00:00.0"
    snapshot = MemorySnapshot(
        "hyper-v",
        {f"{bus}/9a3c:00:00.0/class": "0x030200\n"},
        {link: f"../../../{bus.removeprefix('/sys/')}/9a3c:00:00.0"},
    )
    redacted = redact(gather(snapshot).snapshot, IDENTITIES).snapshot
    assert redacted.read_text(f"{link}/class") == "0x030200\n"
    assert "7b41c0de" not in (redacted.real_path(link) or "7b41c0de")


def test_identities_are_read_from_the_host() -> None:
    files = {path: f"word{i}\n" for i, path in enumerate(IDENTITY_PATHS)}
    snapshot = MemorySnapshot("host", files, {}, {"user": "jdoe\n"})
    identities = read_identities(snapshot, Identities(hosts=("gpu7",)))
    assert identities == Identities(("gpu7", "word0", "word1", "word2", "word3"), ("jdoe",))


@needs_shared
def test_a_published_query_keeps_its_gpus() -> None:
    text = shared("machines/nvidia-smi/qx-h100.xml").read_text()
    kept = _redacted("nvidia-smi-query", text, Identities())
    gpus, theirs = (re.findall("<gpu id=[^>]*>", each) for each in (kept, text))
    assert gpus == theirs and "1650000000001" not in kept


@needs_shared
def test_a_published_lspci_keeps_every_device() -> None:
    text = shared("machines/lspci/gpud-hgx-h100x8-lspci-vvv.txt").read_text()
    kept = _redacted("lspci", text)
    assert parse_lspci(kept) == parse_lspci(text)
    changed = {
        old.strip()[:24]
        for old, new in zip(text.splitlines(), kept.splitlines(), strict=True)
        if old != new
    }
    fields = r"\[\w\w\] |Capabilities: \[\w+ v1\]|DeviceName: "
    assert all(re.match(fields, line) for line in changed), changed
    assert "MT2340J88735" not in kept


@pytest.mark.parametrize("host", ["vm", "v1", "gpu", "x"])
def test_a_name_too_short_to_look_for_goes_where_it_is_known_to_stand_and_is_reported(
    host: str,
) -> None:
    text = (
        f"Linux {host} 6.8.0-41-generic #41 SMP (root@{host}) x86_64\nHost name: {host}\n"
        f'<hostname>{host}</hostname>\n"nodename"="{host}"\n'
    )
    result = redact(MemorySnapshot("h", {}, {}, {"uname": text}), Identities((host,), ("root",)))
    assert not re.search(rf"\b{host}\b", result.snapshot.commands["uname"])
    assert result.snapshot.commands["uname"].count("host-1") == 4
    assert result.not_everywhere == ("host name",)


def test_names_that_are_replaced_everywhere_or_tell_nothing_need_no_word() -> None:
    snapshot = MemorySnapshot("h", {}, {}, {"uname": "Linux localhost 6.8.0"})
    for identities in (IDENTITIES, Identities(("localhost",), ("root",))):
        assert redact(snapshot, identities).not_everywhere == ()
    assert redact(snapshot, Identities((), ("jd",))).not_everywhere == ("user name",)


def test_of_amd_gpus_no_serial_is_kept() -> None:
    states = '[{"gpu": 0, "asic": {"asic_serial": "0xDEAD", "oam_id": 1}}]'
    card = '{"card0": {"PCI Bus": "0000:C1:00.0", "Serial Number": "0xDEAD"}}'
    commands = {"amd-smi-topology": states, "rocm-smi-json": card}
    shown = redact(MemorySnapshot("host", {}, {}, commands), Identities()).snapshot.commands
    for name, text in commands.items():
        assert shown[name] == text.replace("0xDEAD", "redacted")


def test_an_interface_that_is_named_by_its_mac_has_the_pseudonym_of_it() -> None:
    names = Pseudonyms()
    said = names.scrub("enx0a1b2c3d4e5f 0a:1b:2c:3d:4e:5f enp1s0 wlx0A1B2C3D4E5F")
    name, mac, plain, wireless = said.split()
    assert name == f"enx{mac.replace(':', '')}" and wireless == f"wlx{name[3:]}"
    assert "0a1b2c3d4e5f" not in said.lower() and plain == "enp1s0"


def test_names_of_nics_builds_and_firmware_of_ones_own_do_not_survive() -> None:
    files = {
        "/proc/sys/kernel/osrelease": "6.8.0-45-acme+gpu-generic",
        "/proc/version": "Linux version 6.8.0-45-acme (root@acme) (gcc 13.2.0 acme) #45 SMP",
        "/sys/devices/virtual/dmi/id/bios_vendor": "Acme Cloud",
    }
    topology = (
        "\tGPU0\troce_acme\tNIC0\tCPU Affinity\nGPU0\tX\tPIX\tSYS\t0-7\nroce_acme\tPIX\tX\tSYS\n"
        "NIC0\tSYS\tSYS\tX\n\nNIC Legend:\n\n  NIC0: mlx5_acme\n  NIC1: mlx5_0\n"
    )
    commands = {
        "nvidia-smi-topo": topology,
        "qemu-version": "QEMU emulator version 8.2.2 (qemu-8.2.2-acme.el9)\n",
        "uname": "Linux 6.8.0-45-acme #45~22.04-acme SMP Fri Aug 30 12:02:04 UTC 2024 x86_64\n",
    }
    left = redact(MemorySnapshot("host", files, {}, commands), Identities()).snapshot
    assert "acme" not in _texts(left).lower()
    assert left.files["/proc/sys/kernel/osrelease"] == "6.8.0-45-redacted+redacted-generic"
    uname = "Linux 6.8.0-45-redacted #45~22.04-redacted SMP Fri Aug 30 12:02:04 UTC 2024 x86_64\n"
    assert left.commands["uname"] == uname
    underlined = topology.replace("\tGPU0", "\t\x1b[4mGPU0").replace("finity", "finity\x1b[0m")
    matrix = left.commands["nvidia-smi-topo"]
    assert _redacted("nvidia-smi-topo", underlined, Identities()) == matrix
    devices = [device.name for device in parse_topology(matrix).devices]
    assert devices == ["GPU0", "nic-1", "NIC0"]
    assert matrix.endswith("NIC0: nic-2\n  NIC1: mlx5_0\n")
