"""What programs inside a virtual host share: libvirtd by hand, homenode in this process, /proc."""

import contextlib
import importlib
import io
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from homenode.machine.tools.versions import Version
from homenode.vm.domain.iommu import LIBVIRT_WITH_IOMMUFD, QEMU_WITH_IOMMUFD

URI = "qemu:///system"
_HOSTDEV = """<hostdev mode='subsystem' type='pci' managed='yes'><driver name='vfio'/><source>
<address domain='0x{0}' bus='0x{1}' slot='0x{2}' function='0x0'/></source></hostdev>"""


def say(name: str, text: str) -> None:
    """A line of the console that the test looks for."""
    print(f"@@{name} {text}", flush=True)


def step(what: str) -> None:
    say("STEP", f"{time.clock_gettime(time.CLOCK_BOOTTIME):.1f} {what}")


def virsh(*words: str) -> str:
    done = subprocess.run(
        ["virsh", "-q", "-c", URI, *words], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise RuntimeError(f"virsh {words}: {done.stderr}")
    return done.stdout


def hostdevs(addresses: Iterable[str]) -> str:
    return "".join(_HOSTDEV.format(*bdf.replace(".", ":").split(":")) for bdf in addresses)


def start_libvirtd() -> None:
    # libvirtd would ask it for its capabilities too: seconds, for a program that nothing uses.
    Path("/usr/bin/qemu-system-i386").unlink(missing_ok=True)
    subprocess.run(["virtlogd", "-d"], check=True)
    subprocess.run(["libvirtd", "-d"], check=True)
    # Importing takes as long as libvirtd does to come up: the two at once.
    for module in (
        "homenode.cli.main",
        "homenode.cli.apply",
        "homenode.vm.sources",
        "homenode.plan.pipeline",
        "homenode.machine.discover",
        "homenode.change.apply.definition",
        "homenode.vm.domain.schema",
        "homenode.check.verify.live.capture",
    ):
        importlib.import_module(module)
    for _ in range(100):
        done = subprocess.run(["virsh", "-c", URI, "uri"], capture_output=True, check=False)
        if not done.returncode:
            return
        time.sleep(0.5)
    raise RuntimeError("libvirtd does not answer")


def homenode(*words: str) -> str:
    """Standard output of a command. Raises RuntimeError where it does not end well."""
    code, output = homenode_ended(*words)
    if code:
        raise RuntimeError(f"homenode {words}: exit code {code}: {output}")
    return output


def homenode_ended(*words: str) -> tuple[int, str]:
    """Exit code and standard output of a command, in this process: starting Python again takes
    seconds here."""
    from homenode.cli.main import run

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            run(words)
        except SystemExit as end:
            return int(end.code or 0), output.getvalue()
    return 0, output.getvalue()


def verified(name: str, plan: str | None = None) -> Any:
    """The findings on a running domain, as JSON."""
    from homenode.check.verify.live.capture import verify_running_domain
    from homenode.formats import encode
    from homenode.plan.stored import read_plan

    planned = None if plan is None else read_plan(Path(plan).read_bytes(), plan)
    return json.loads(encode("findings", verify_running_domain(name, URI, planned)))


def without_iommufd(libvirt: Version, qemu: Version | None, *, has_device: bool) -> str | None:
    """Why a VM's devices cannot go through iommufd here; None where they can.

    has_device: whether this kernel has /dev/iommu.
    """
    missing = [
        f"{name} {'of no known version' if found is None else '.'.join(map(str, found))} "
        f"(iommufd is in {'.'.join(map(str, first))})"
        for name, found, first in (
            ("libvirt", libvirt, LIBVIRT_WITH_IOMMUFD),
            ("QEMU", qemu, QEMU_WITH_IOMMUFD),
        )
        if found is None or found < first
    ]
    missing += [] if has_device else ["a kernel without /dev/iommu"]
    return ", ".join(missing) or None


def process_of(name: str) -> str:
    return Path(f"/run/libvirt/qemu/{name}.pid").read_text().strip()


def threads(pid: str) -> dict[str, str]:
    """Name -> CPUs of each thread, read without homenode."""
    found: dict[str, str] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        status = (task / "status").read_text().splitlines()
        found[name] = next(line.split()[1] for line in status if "Cpus_allowed_list" in line)
    return found


def bound_memory(pid: str) -> list[tuple[str, int, dict[str, int]]]:
    """(policy, KiB of a page, pages by node) of every mapping with a policy of its own, read
    without homenode."""
    found = []
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        words = line.split()
        if words[1].startswith("bind"):
            counts = (word[1:].split("=") for word in words if word[:1] == "N")
            pages = {node: int(count) for node, count in counts}
            sizes = [word for word in words if word.startswith("kernelpagesize_kB=")]
            if pages and sizes:  # the size is missing while a mapping goes
                found.append((words[1], int(sizes[0].split("=")[1]), pages))
    return found


def run_and_report(main: Callable[[], None]) -> None:
    """Runs a program to its @@DONE, or gives on the console why it did not get there."""
    try:
        step("python")
        main()
        say("DONE", "")
    except BaseException:  # whatever it is, the machine that would show it is gone then
        traceback.print_exc(file=sys.stdout)
        for log in (
            Path("/var/log/libvirt/libvirtd.log"),
            *Path("/var/log/libvirt/qemu").iterdir(),
        ):
            if log.exists():
                print(f"{log}:\n{log.read_text()[-1500:]}", flush=True)
        raise
