"""A distribution adds a target by an entry point: it plans, writes, reads back and verifies."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from homenode.check.verify.target_file import verify_target
from homenode.errors import InputError
from homenode.findings import Severity
from homenode.plan.vm_file import plan_for_target, read_vm, vm_of_options
from homenode.vm.targets.registry import others, target_named
from tests.cli.test_plan import homenode
from tests.targets.page import targets_page
from tests.targets.written import host_named, options

HOST = "small-2n8c-2gpu"

BOX = '''
"""A file of `key=value` lines: the least that a target is."""

from homenode.vm.targets.target import Feature, Rendering, Target, lost, native
from homenode.units import MIB
from homenode.vm.model import GuestTopology, Vm

SAID = {Feature.TOPOLOGY}


def render(plan, guest, host, given, source):
    sockets, dies, cores, threads = plan.vm.cpu_topology
    text = f"box\\\\nvcpus={plan.vm.vcpus}\\\\nmib={plan.vm.memory_bytes // MIB}\\\\n"
    return Rendering(f"{text}shape={sockets} {dies * cores} {threads}\\\\n".encode())


def read_vm(content, source):
    lines = content.decode().splitlines()[1:]
    values = dict(line.split("=") for line in lines)
    sockets, cores, threads = map(int, values["shape"].split())
    return Vm(
        name="box",
        vcpus=int(values["vcpus"]),
        memory_bytes=int(values["mib"]) * MIB,
        cpu_topology=GuestTopology(sockets, 1, cores, threads),
    )


TARGET = Target(
    title="Box",
    source="this test",
    support={
        one: native("a line") if one in SAID else lost("no line", "it") for one in Feature
    },
    unread=frozenset(("emulator", "binding")),
    render=render,
    read_vm=read_vm,
    recognises=lambda content: content.startswith(b"box"),
)
'''.replace("\\\\n", "\\n")

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution with entry points and a module onto Python's path."""

    def installed(name: str, entry: str, module: str = BOX) -> Path:
        folder = tmp_path / name
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[homenode.targets]\n{entry}\n")
        (folder / f"{name}.py").write_text(module)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return folder

    return installed


def test_a_target_of_another_distribution_is_planned_written_read_and_verified(
    install: Install,
) -> None:
    install("box_target", "box = box_target:TARGET")
    assert others() == ("box",)
    host, wanted = host_named(HOST), options("pin-numa")
    made = plan_for_target(vm_of_options(wanted, host.architecture), wanted, host, "box")
    content = made.rendering.document
    read = read_vm(content, "vm.box")
    assert (read.kind, read.guest.vcpus) == ("box", 4)
    assert {f.id for f in made.findings} == {"target-lost"}

    def found(file: bytes) -> list[str]:
        report = verify_target(file, "vm.box", "box", made.plan, host=host)
        return [f.id for f in report.findings if f.severity is not Severity.INFO]

    assert found(content) == []
    assert found(content.replace(b"vcpus=4", b"vcpus=5")) == ["plan-vcpus"]
    assert "| sockets and cores of the guest | yes |" in targets_page(["box"])


def test_the_program_takes_it_by_name_and_knows_its_files(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install("box_program", "box = box_program:TARGET")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    file, plan = tmp_path / "vm.box", tmp_path / "plan.json"
    size = ("--vcpus", "4", "--memory", "2GiB", "--host", HOST, "--layout", "pin-numa")
    done = homenode("plan", *size, "--target", "box", "-o", file, "--save-plan", plan)
    assert done.exit_code == 0, done.stderr
    done = homenode("verify", file, "--plan", plan, "--host", HOST)
    assert done.exit_code == 0, done.stdout + done.stderr
    file.write_bytes(file.read_bytes().replace(b"mib=2048", b"mib=1024"))
    assert homenode("verify", file, "--plan", plan, "--host", HOST).exit_code


def test_a_name_of_homenode_is_not_given_to_another(install: Install) -> None:
    install("box_xen", "xen = box_xen:TARGET")
    assert target_named("xen").title == "Xen"
    with pytest.raises(InputError, match=r"xen = box_xen:TARGET of box_xen: .* does not have"):
        others()


def test_two_distributions_with_one_name_are_refused(install: Install) -> None:
    install("box_one", "box = box_one:TARGET")
    install("box_two", "box = box_two:TARGET")
    with pytest.raises(InputError, match=r"of box_two: expected box once, .* box_one"):
        others()


@pytest.mark.parametrize(
    ("name", "module", "found"),
    [
        ("box_absent", "", "AttributeError"),
        ("box_broken", "import no_such_module_at_all", "ModuleNotFoundError"),
        ("box_raises", "raise RuntimeError('out of order')", "RuntimeError: out of order"),
        ("box_other", "TARGET = 7", "found int"),
        ("box_short", BOX.replace("in Feature\n", "in SAID\n"), "found none for vcpu-pins"),
    ],
)
def test_an_entry_point_that_does_not_load_is_named(
    install: Install, name: str, module: str, found: str
) -> None:
    install(name, f"box = {name}:TARGET", module)
    with pytest.raises(InputError, match=f"box = {name}:TARGET of {name}: .*{found}"):
        target_named("box")
    with pytest.raises(InputError, match=name):  # a file that none of ours takes asks it
        read_vm(b"nothing that is known", "vm")


def test_a_file_of_ours_loads_no_other(install: Install) -> None:
    install("box_unasked", "box = box_unasked:TARGET", "raise RuntimeError")
    wanted = structs.replace(options("pin"), layout="pin")
    host = host_named(HOST)
    made = plan_for_target(vm_of_options(wanted, host.architecture), wanted, host, "xen")
    assert read_vm(made.rendering.document, "vm").kind == "xen"
    assert "box_unasked" not in sys.modules
