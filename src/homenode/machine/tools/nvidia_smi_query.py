"""nvidia-smi -q -x: what NVIDIA's driver says of each GPU.

Only for GPUs that the driver holds: those given to vfio-pci are not listed. The PCIe generation
and width are those of the link while idle, unless performance_state says P0.

Seen of drivers 535 to 580 (nvsmi_device_v12.dtd, v13). Source: man nvidia-smi, "GPU ATTRIBUTES".
"""

import re

from lxml import etree
from msgspec import Struct

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.machine.tools.xml_text import parse_xml
from homenode.units import MIB

COMMAND = ("nvidia-smi", "-q", "-x")

_SOURCE = "nvidia-smi -q -x"
_WIDTH = re.compile(r"(\d{1,2})x", re.ASCII)
_MIB = re.compile(r"(\d{1,9}) MiB", re.ASCII)
_NUMBER = re.compile(r"(\d{1,9})", re.ASCII)
_ABSENT = frozenset(
    {
        "",
        "n/a",
        "none",
        "not supported",
        "unknown error",
        "insufficient permissions",
        "gpu is lost",
        "gpu requires reset",
        "not available",
        "not found",
        "requested functionality has been deprecated",
    }
)


class NvidiaMigDevice(Struct, frozen=True):
    """A compute instance. index: its number on its GPU. instance: of the GPU instance it is on.

    memory_bytes: of that GPU instance.
    """

    index: int
    instance: int
    memory_bytes: int | None


class NvidiaGpu(Struct, frozen=True):
    """One GPU. None where the driver says N/A, or where its version does not have the field.

    index:     position in the output: the number that other nvidia-smi commands use.
    max_gen:   PCIe generation that GPU and host both can; device_max_gen is the GPU's own.
    c2c:       an NVLink-C2C to the host's CPU is in use.
    addressing_mode: "ATS" where the CPU's page tables serve the GPU (GH200, GB200), "HMM", ...
    virtualization_mode: "Pass-Through" in a guest, "None" on a bare host.
    memory_bytes, bar1_bytes: totals. replays: packets that its link sent again since its driver
    was loaded; a sound machine has a hundred.
    """

    index: int
    bdf: Bdf
    uuid: str | None
    name: str | None
    architecture: str | None
    board_part_number: str | None
    vbios_version: str | None
    module_id: int | None
    current_gen: int | None
    max_gen: int | None
    device_max_gen: int | None
    current_width: int | None
    max_width: int | None
    c2c: bool | None
    mig: bool | None
    addressing_mode: str | None
    virtualization_mode: str | None
    performance_state: str | None
    memory_bytes: int | None
    bar1_bytes: int | None
    replays: int | None = None
    mig_devices: tuple[NvidiaMigDevice, ...] = ()


class NvidiaQuery(Struct, frozen=True):
    """gpus: in the tool's order.

    unread: (GPU, element, text) whose text we do not understand; its field is None.
    """

    driver_version: str | None
    cuda_version: str | None
    gpus: tuple[NvidiaGpu, ...]
    unread: tuple[tuple[Bdf, str, str], ...]


def parse(text: str) -> NvidiaQuery:
    """The GPUs. Elements that we do not use are skipped: there are 300, and more in each release.

    Raises ParseError where the text is no such document or a GPU has no address, or another's.
    """
    root = parse_xml(text, "nvidia_smi_log", _SOURCE)
    unread: list[tuple[Bdf, str, str]] = []
    gpus = tuple(_gpu(gpu, index, unread) for index, gpu in enumerate(root.findall("gpu")))
    if len({gpu.bdf for gpu in gpus}) != len(gpus):
        raise ParseError(_SOURCE, "each GPU once", ", ".join(str(gpu.bdf) for gpu in gpus))
    return NvidiaQuery(
        _text(root, "driver_version"), _text(root, "cuda_version"), gpus, tuple(unread)
    )


def _gpu(gpu: etree._Element, index: int, unread: list[tuple[Bdf, str, str]]) -> NvidiaGpu:
    bdf = Bdf.parse(str(gpu.get("id", "")), f"{_SOURCE}: gpu {index}")

    def number(path: str, pattern: "re.Pattern[str]" = _NUMBER) -> int | None:
        found = _text(gpu, path)
        matched = None if found is None else pattern.fullmatch(found)
        if found is not None and matched is None:
            unread.append((bdf, path, found))
        return None if matched is None else int(matched[1])

    def switch(path: str) -> bool | None:
        found = _text(gpu, path)
        if found is not None and found not in ("Enabled", "Disabled"):
            unread.append((bdf, path, found))
        return {"Enabled": True, "Disabled": False}.get(found or "")

    memory_mib = number("fb_memory_usage/total", _MIB)
    bar1_mib = number("bar1_memory_usage/total", _MIB)
    link = "pci/pci_gpu_link_info"
    return NvidiaGpu(
        index=index,
        bdf=bdf,
        uuid=_text(gpu, "uuid"),
        name=_text(gpu, "product_name"),
        architecture=_text(gpu, "product_architecture"),
        board_part_number=_text(gpu, "board_part_number"),
        vbios_version=_text(gpu, "vbios_version"),
        module_id=number("platformInfo/module_id"),
        current_gen=number(f"{link}/pcie_gen/current_link_gen"),
        max_gen=number(f"{link}/pcie_gen/max_link_gen"),
        device_max_gen=number(f"{link}/pcie_gen/max_device_link_gen"),
        current_width=number(f"{link}/link_widths/current_link_width", _WIDTH),
        max_width=number(f"{link}/link_widths/max_link_width", _WIDTH),
        c2c=switch("c2c_mode"),
        mig=switch("mig_mode/current_mig"),
        addressing_mode=_text(gpu, "addressing_mode"),
        # "None" is a mode here: no virtualization.
        virtualization_mode=_plain(gpu, "gpu_virtualization_mode/virtualization_mode"),
        performance_state=_text(gpu, "performance_state"),
        memory_bytes=None if memory_mib is None else memory_mib * MIB,
        bar1_bytes=None if bar1_mib is None else bar1_mib * MIB,
        replays=number("pci/replay_counter"),
        mig_devices=_mig_devices(gpu, bdf, unread),
    )


def _mig_devices(
    gpu: etree._Element, bdf: Bdf, unread: list[tuple[Bdf, str, str]]
) -> tuple[NvidiaMigDevice, ...]:
    found: list[NvidiaMigDevice] = []
    for device in gpu.findall("mig_devices/mig_device"):
        index, instance = _text(device, "index"), _text(device, "gpu_instance_id")
        numbers = [_NUMBER.fullmatch(text or "") for text in (index, instance)]
        memory = _MIB.fullmatch(_text(device, "fb_memory_usage/total") or "")
        if numbers[0] is None or numbers[1] is None:
            unread.append((bdf, "mig_device", f"index {index}, gpu_instance_id {instance}"))
            continue
        size = None if memory is None else int(memory[1]) * MIB
        found.append(NvidiaMigDevice(int(numbers[0][1]), int(numbers[1][1]), size))
    return tuple(found)


def _plain(element: etree._Element, path: str) -> str | None:
    text = (element.findtext(path) or "").strip()
    return None if text in ("", "N/A", "[N/A]") else text


def _text(element: etree._Element, path: str) -> str | None:
    """The text at a path; None where it is missing or one of the many ways to say so."""
    text = (element.findtext(path) or "").strip()
    return None if text.strip("[]").lower() in _ABSENT else text
