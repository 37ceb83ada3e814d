"""Outputs of nvidia-smi."""

import pytest

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.machine.tools import nvidia_smi
from tests.mutations import survives
from tests.shared_data import SHARED

NICS = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-35\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_bond_0\n\n"
)
QUERY = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
\t<driver_version>550.54.15</driver_version><cuda_version>[N/A]</cuda_version>
\t<gpu id="00000009:01:00.0"><product_name>NVIDIA GH200 480GB</product_name>
\t<c2c_mode>Enabled</c2c_mode><addressing_mode>ATS</addressing_mode>
\t<mig_mode><current_mig>N/A</current_mig></mig_mode>
\t<gpu_virtualization_mode><virtualization_mode>None</virtualization_mode></gpu_virtualization_mode>
\t<pci><pci_gpu_link_info><pcie_gen><max_link_gen>5</max_link_gen>
\t<current_link_gen>Unknown Error</current_link_gen><max_device_link_gen>five</max_device_link_gen>
\t</pcie_gen><link_widths><max_link_width>16x</max_link_width>
\t<current_link_width>1x</current_link_width></link_widths></pci_gpu_link_info></pci>
\t<fb_memory_usage><total>97871 MiB</total></fb_memory_usage></gpu>
</nvidia_smi_log>
"""


def _published(*parts: str) -> str:
    path = SHARED.joinpath("machines", *parts)
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path.read_text()


def test_the_matrix_of_four_gh200_has_lists_of_nodes() -> None:
    matrix = nvidia_smi.parse_topology(_published("topo-m", "gh200x4-nvidia-smi-topo-m.txt"))
    assert [device.memory_node for device in matrix.devices] == [4, 12, 20, 28]
    assert matrix.devices[1].nodes == (1, 13, 14, 15, 16, 17, 18, 19)
    assert matrix.devices[3].cpus == CpuSet.parse("216-287")
    assert matrix.count_nvlinks(0, 3) == 6 and matrix.count_nvlinks(0, 0) == 0


def test_the_matrix_with_terminal_codes_and_legend_is_read() -> None:
    text = _published("topo-m", "rtxpro6000x8-2xturin-nvidia-smi-topo-m.txt")
    matrix = nvidia_smi.parse_topology(text)
    assert [device.name for device in matrix.devices] == [f"GPU{i}" for i in range(8)]
    assert matrix.links[0] == ("X", "PIX", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS")
    assert matrix.devices[7].cpus == CpuSet.parse("64-127,192-238")
    assert {device.memory_node for device in matrix.devices} == {None}


def test_nics_and_gpus_without_cpus_are_distinguished() -> None:
    matrix = nvidia_smi.parse_topology(NICS)
    gpu0, gpu1, nic = matrix.devices
    assert (gpu0.cpus, gpu0.nodes) == (CpuSet.parse("0-35"), (0,))
    assert (gpu1.cpus, gpu1.nodes, gpu1.memory_node) == (None, (1,), None)
    assert (nic.name, nic.cpus, nic.nodes) == ("NIC0", None, None)
    assert matrix.links[2] == ("PIX", "SYS", "X")
    assert matrix.count_nvlinks(0, 1) == 18


@pytest.mark.parametrize(
    ("row", "cpus", "nodes", "memory_node"),
    [
        ("GPU0\t X \t0-7\t\tN/A\t\tN/A", "0-7", None, None),
        ("GPU0\t X \t0-63,128-191\t0\t\tN/A", "0-63,128-191", (0,), None),
        ("GPU0\t X \t\t1\t\t4", None, (1,), 4),
        ("GPU0\t X \t0-7\t\t\t2", "0-7", None, 2),
        ("GPU0\t X \t\t\t\t2", None, None, 2),
        ("GPU0     X      0-251   0-1             -1", "0-251", (0, 1), None),
    ],
)
def test_tabs_that_do_not_count_columns_are_understood(
    row: str, cpus: str | None, nodes: tuple[int, ...] | None, memory_node: int | None
) -> None:
    text = f"\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n{row}\n"
    (device,) = nvidia_smi.parse_topology(text).devices
    assert device.cpus == (None if cpus is None else CpuSet.parse(cpus))
    assert (device.nodes, device.memory_node) == (nodes, memory_node)


def test_older_matrices_have_fewer_columns_and_names_of_nics() -> None:
    text = (
        "\tGPU0\tmlx5_0\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\t X \tPHB\t0-31\t\tN/A\nmlx5_0\tPHB\t X \n"
    )
    gpu, nic = nvidia_smi.parse_topology(f"Thu Jan 1\n# nvidia-smi topo -m\n{text}").devices
    assert (gpu.cpus, gpu.nodes, nic.name) == (CpuSet.parse("0-31"), None, "mlx5_0")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "some rows"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the driver", "a header"),
        ("\tGPU0\tGPU1\nGPU0\tX\tNV1\n", "2 rows"),
        ("\tGPU0\nGPU1\tX\n", "2: expected the row of GPU0"),
        ("\tGPU0\tGPU0\nGPU0\tX\n", "a header"),
        ("\tGPU0\tGPUx\nGPU0\tX\tNV1\nGPUx\tNV1\tX\n", "a header"),
        ("\tGPU0\nGPU0\tX\nGPU1\tX\n", "3: expected 1 row"),
        ("\tGPU0\tGPU1\nGPU0\tX\tNODESYS9999\n", "2 links"),
        ("\tGPU0 CPU Affinity Moon Phase\n", "columns"),
        ("\tGPU0\tCPU Affinity\nGPU0\tX\t0-x\n", "0-x"),
        ("GPU0 CPU Affinity NUMA Affinity GPU NUMA ID\nGPU0 X 0-7 0\n", "3 affinities"),
        ("\tGPU0\nGPU0\tX\nLegend:\n what\n", "4: expected a line of the legend"),
    ],
)
def test_a_matrix_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        nvidia_smi.parse_topology(text)


def test_a_query_tells_c2c_and_what_is_not_there_is_none() -> None:
    (gpu,) = nvidia_smi.parse_query(QUERY).gpus
    assert (gpu.bdf, gpu.name) == (Bdf.parse("0009:01:00.0"), "NVIDIA GH200 480GB")
    assert (gpu.c2c, gpu.mig, gpu.performance_state) == (True, None, None)


def test_what_a_query_says_oddly_is_listed_and_not_lost() -> None:
    query = nvidia_smi.parse_query(QUERY.replace("<c2c_mode>Enabled", "<c2c_mode>perhaps"))
    assert query.gpus[0].c2c is None
    assert query.unread == ((Bdf.parse("0009:01:00.0"), "c2c_mode", "perhaps"),)


def test_the_published_query_of_eight_h100_is_read_whole() -> None:
    query = nvidia_smi.parse_query(_published("nvidia-smi", "qx-h100.xml"))
    assert len(query.gpus) == 8 and not query.unread
    assert {gpu.name for gpu in query.gpus} == {"NVIDIA H100 80GB HBM3"}
    assert {gpu.c2c for gpu in query.gpus} == {False}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "well-formed XML"),
        ("<nvidia_smi_log><gpu id='x'/></nvidia_smi_log>", "domain:bus:device.function"),
        ("<other/>", "expected <nvidia_smi_log>"),
        (QUERY.replace("</nvidia_smi_log>", ""), "well-formed XML"),
        (
            '<!DOCTYPE a [<!ENTITY b "c">]><nvidia_smi_log>&b;</nvidia_smi_log>',
            "XML without entity declarations",
        ),
        (QUERY.replace("</gpu>", "</gpu><gpu id='0009:01:00.0'/>"), "each GPU once"),
    ],
)
def test_a_query_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        nvidia_smi.parse_query(text)


def test_no_external_file_is_read() -> None:
    text = QUERY.replace("nvsmi_device_v12.dtd", "file:///etc/passwd").replace("550.54.15", "&x;")
    try:
        assert nvidia_smi.parse_query(text).gpus
    except ParseError as error:
        assert "x" in error.message


@pytest.mark.parametrize(
    ("parser", "text"),
    [(nvidia_smi.parse_topology, NICS), (nvidia_smi.parse_query, QUERY)],
    ids=["topo", "query"],
)
def test_damaged_output_is_read_or_refused_and_nothing_else(parser: object, text: str) -> None:
    assert callable(parser)
    assert survives(parser, text, 600) > 0
