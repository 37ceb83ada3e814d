"""VmFile: a VM as some hypervisor's file says it, whichever that is, or as options alone do."""

from dataclasses import dataclass, replace

from msgspec import structs

from homenode.domain.new import DEFAULT_NAME
from homenode.domain.read import read_vm as read_domain
from homenode.errors import InputError, UsageError
from homenode.plan.options import PlanOptions
from homenode.targets.registry import recognised, target_named
from homenode.targets.target import default_machine
from homenode.topology import Host
from homenode.vm.model import Vm

LIBVIRT = "libvirt"


@dataclass(frozen=True, slots=True)
class VmFile:
    """kind: "libvirt" or the name of a target; None = options alone. content: None then."""

    kind: str | None
    guest: Vm
    content: bytes | None
    source: str


def target_of(content: bytes) -> str | None:
    """The target that a file is of, by its content; None for a domain document, and for others."""
    if _is_xml(content):
        return None
    return recognised(content)


def _is_xml(content: bytes) -> bool:
    start = content[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
    return start[:1] == b"<" or content[:2] in (b"\xff\xfe", b"\xfe\xff", b"<\0", b"\0<")


def kind_of(content: bytes, source: str, named: str | None = None) -> str:
    """Whose file this is, by its content. named: the target that was asked for, of which a file may
    be that its content alone does not tell. Raises InputError for none that is known."""
    target = target_of(content)
    if target is not None:
        return target
    if _is_xml(content):
        return LIBVIRT
    if named not in (None, LIBVIRT) and target_named(named).may_be(content):
        return named
    raise InputError(
        f"{source}: expected a VM: libvirt's XML, a configuration of qm, xl or Incus, a command of "
        "Cloud Hypervisor, a flavor as JSON, a template of OpenNebula or a script of homenode; "
        "found none of these"
    )


def read_vm(content: bytes, source: str, named: str | None = None) -> VmFile:
    """The VM of a file. named: as `kind_of`. Raises ParseError or InputError."""
    kind = kind_of(content, source, named)
    if kind == LIBVIRT:
        return VmFile(kind, read_domain(content, source), content, source)
    return VmFile(kind, target_named(kind).read_vm(content, source), content, source)


def size_of_options(options: PlanOptions) -> tuple[int, int]:
    """vCPUs and bytes of memory of a VM of which only options say something; those of --cell are
    summed. Raises UsageError where they say neither."""
    cells = options.explicit_cells
    vcpus = sum(cell.vcpus for cell in cells) if cells else options.vcpus
    memory_bytes = sum(cell.memory_bytes for cell in cells) if cells else options.memory_bytes
    if vcpus is None or memory_bytes is None:
        given = [
            name
            for name, one in (("--vcpus", vcpus), ("--memory", memory_bytes))
            if one is not None
        ]
        raise UsageError(
            f"expected a VM's file, or --vcpus and --memory, found {given[0] if given else 'none'}"
            f"{' alone' if given else ''}",
            hint="homenode plan --vcpus 16 --memory 64GiB --gpus 2 -o vm.xml",
        )
    if vcpus < 1 or memory_bytes < 1:
        raise UsageError("--vcpus, --memory: expected more than 0")
    return vcpus, memory_bytes


def vm_of_options(
    options: PlanOptions, architecture: str | None, name: str = DEFAULT_NAME
) -> VmFile:
    """A VM of which only options say something. Raises UsageError without vCPUs and memory."""
    vcpus, memory_bytes = size_of_options(options)
    architecture = architecture or "x86_64"
    vm = Vm(
        name=name,
        source="options",
        architecture=architecture,
        machine=default_machine(architecture),
        cpu_mode="host-passthrough",
        vcpus=vcpus,
        memory_bytes=memory_bytes,
        vcpu_pins=(None,) * vcpus,
    )
    return VmFile(None, vm, None, "options")


def on_host(vm: VmFile, host: Host) -> VmFile:
    """The VM with what its file leaves to a host: architecture, functions of whole cards."""
    if vm.kind in (None, LIBVIRT) or vm.content is None:
        return vm
    target = target_named(vm.kind)
    guest = vm.guest
    arm = host.architecture == "aarch64"
    if arm and target.architecture_of_host and b"x86_64" not in vm.content:
        guest = structs.replace(guest, architecture="aarch64", machine="virt")
    return replace(vm, guest=target.on_host(guest, vm.content, vm.source, host))
