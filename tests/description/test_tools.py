"""What tools would print on a described host, read by the parsers of those tools."""

import pytest

from homenode.errors import InputError
from homenode.machine.description.parse import load_shipped, parse_description
from homenode.machine.tools import amd_smi, nvidia_smi
from homenode.machine.tools.lspci import parse as parse_lspci
from homenode.machine.tools.versions import parse_qemu_version, parse_virsh_version
from tests.rendered.machine import render

HEAD = 'name = "a"\npackages = 2\ncores_per_package = 4\nmemory_per_node = "8GiB"\n'


def _output(text: str, command: str) -> str:
    output = render(parse_description(HEAD + text, "host.toml")).command_output(command)
    assert output is not None
    return output


def test_nvidia_smi_tells_nvlinks_and_the_nodes_of_gpu_memory() -> None:
    output = render(load_shipped("gh200x4")).command_output("nvidia-smi-topo")
    matrix = nvidia_smi.parse_topology(output or "")
    assert [device.memory_node for device in matrix.devices] == [4, 12, 20, 28]
    assert [str(device.cpus) for device in matrix.devices] == [
        "0-71",
        "72-143",
        "144-215",
        "216-287",
    ]
    assert {matrix.nvlinks(a, b) for a in range(4) for b in range(4) if a != b} == {6}


def test_nvidia_smi_tells_how_gpus_without_nvlink_reach_each_other() -> None:
    matrix = nvidia_smi.parse_topology(
        _output(
            """
            [[root]]
            node = 0
            ports = [{ switch = ["gpu", "gpu"] }, "gpu"]
            [[root]]
            node = [0, 1]
            ports = ["gpu"]
            [[link]]
            kind = "nvlink"
            between = ["gpu.2", "gpu.3"]
            count = 4
            """,
            "nvidia-smi-topo",
        )
    )
    assert matrix.links[0] == ("X", "PIX", "PHB", "NODE", "SYS")
    assert matrix.nvlinks(2, 3) == 4


def test_gpus_of_another_driver_are_not_seen_and_have_no_links() -> None:
    text = """
        [[root]]
        ports = ["gpu", { model = "gpu", driver = "vfio-pci" }]
        """
    assert len(nvidia_smi.parse_topology(_output(text, "nvidia-smi-topo")).devices) == 1
    with pytest.raises(InputError, match="GPUs that the driver nvidia has"):
        _output(text + '[[link]]\nbetween = "gpu"\ncount = 2', "nvidia-smi-topo")


def test_rocm_smi_tells_xgmi_between_physical_functions_only() -> None:
    output = render(load_shipped("mi350x-epyc9575f")).command_output("rocm-smi-topo")
    topology = amd_smi.parse_rocm_topology(output or "")
    assert len(topology.gpus) == 8
    assert topology.links[0] == (None, *["XGMI"] * 7)
    assert [node for _, node in topology.node_of_gpu] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_versions_are_those_that_the_file_names() -> None:
    text = '[settings]\nlibvirt = "10.4.0"\nqemu = "9.0.2"\n'
    assert parse_virsh_version(_output(text, "virsh-version"))[0] == (10, 4, 0)
    assert parse_qemu_version(_output(text, "qemu-version")) == (9, 0, 2)
    assert render(parse_description(HEAD, "host.toml")).command_output("virsh-version") is None


def test_lspci_names_every_function() -> None:
    description = load_shipped("hgx-h100")
    functions = parse_lspci(render(description).command_output("lspci") or "", "lspci")
    listed = [(f.bdf, f.class_code, f.vendor_id, f.device_id, f.name) for f in functions]
    assert listed == [
        (d.bdf, d.class_code, d.vendor_id, d.device_id, d.name)
        for d in description.host.pci_devices
    ]
