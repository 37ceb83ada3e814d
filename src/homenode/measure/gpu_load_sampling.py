"""LoadSampling: links of GPUs while a copy runs, because idle ones slow down. [I/O]"""

import threading
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.machine.discover.pci_tree import parse_link_speed
from homenode.machine.pci import PciDevice, PciLink
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.topology import Host
from homenode.measure.gpu_load_program import LoadProgram, Reached, reached_by

_EVERY_S = 0.05
_LONGEST_S = 600.0


def sample_under_load(host: Host, snapshot: Snapshot, program: LoadProgram) -> tuple[Host, Reached]:
    """The host with the fastest link that each function showed while the program ran.

    Raises ToolError where the program fails: an idle machine would be mistaken for a busy one.
    """
    devices = [device.bdf for device in host.pci_devices if device.link is not None]
    fastest: dict[Bdf, tuple[float, int]] = {}
    ended = threading.Event()

    def sample() -> None:
        while not ended.is_set():
            for bdf in devices:
                now = _current(snapshot, bdf)
                if now is not None:
                    best = fastest.get(bdf, now)
                    fastest[bdf] = (max(best[0], now[0]), max(best[1], now[1]))
            ended.wait(_EVERY_S)

    # The program is run here and not there: only the main thread hears Ctrl-C, and ends it.
    with ThreadPoolExecutor(1) as pool:
        sampler = pool.submit(sample)
        try:
            output = program.run(_LONGEST_S).stdout_or_raise()
        finally:
            ended.set()
        sampler.result()
    busy = replace(
        host, pci_devices=tuple(_with_link(device, fastest) for device in host.pci_devices)
    )
    return busy, reached_by(program, output)


def _with_link(device: PciDevice, fastest: dict[Bdf, tuple[float, int]]) -> PciDevice:
    seen = fastest.get(device.bdf)
    if seen is None or device.link is None:
        return device
    link = PciLink(seen[0], seen[1], device.link.max_gt_per_s, device.link.max_width)
    return replace(device, link=link)


def _current(snapshot: Snapshot, bdf: Bdf) -> tuple[float, int] | None:
    folder = f"/sys/bus/pci/devices/{bdf}"
    speed = parse_link_speed((snapshot.read_text(f"{folder}/current_link_speed") or "").strip())
    width = (snapshot.read_text(f"{folder}/current_link_width") or "").strip()
    if speed is None or not width.isdecimal() or int(width) in (0, 255):
        return None
    return speed, int(width)
