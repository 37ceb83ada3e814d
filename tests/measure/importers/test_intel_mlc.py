"""Output of Intel Memory Latency Checker."""

import pytest

from homenode.errors import ParseError
from homenode.measure.importers.intel_mlc import parse
from tests.shared_data import needs_shared, shared

OUTPUT = """\
Intel(R) Memory Latency Checker - v3.11b
Command line parameters:

Using buffer size of 2000.000MiB
Measuring idle latencies for random access (in ns)...
\t\tNuma node
Numa node\t     0\t     1\t     2\t
       0\t 108.2\t 195.7\t 564.5\t
       1\t 195.9\t 108.9\t 650.1\t

Measuring Peak Injection Memory Bandwidths for the system
Bandwidths are in MB/sec (1 MB/sec = 1,000,000 Bytes/sec)
Using all the threads from each core if Hyper-threading is enabled
Using traffic with the following read-write ratios
ALL Reads        :\t425097.1\t
3:1 Reads-Writes :\t412457.8\t
Stream-triad like:\t390341.4\t

Measuring Memory Bandwidths between nodes within system
Bandwidths are in MB/sec (1 MB/sec = 1,000,000 Bytes/sec)
Using all the threads from each core if Hyper-threading is enabled
Using Read-only traffic type
\t\tNuma node
Numa node\t     0\t     1\t     2\t
       0\t213139.4\t50923.4\t-\t
       1\t50916.6\t213249.2\t4795.3\t

Measuring Loaded Latencies for the system
Using all the threads from each core if Hyper-threading is enabled
Using Read-only traffic type
Inject\tLatency\tBandwidth
Delay\t(ns)\tMB/sec
==========================
 00000\t230.31\t 425655.9
 20000\t108.96\t   4237.6

Measuring cache-to-cache transfer latency (in ns)...
Local Socket L2->L2 HIT  latency\t47.4
Remote Socket L2->L2 HITM latency (data address homed in writer socket)
\t\t\tReader Numa Node
Writer Numa Node     0\t     1\t
            0\t     -\t 114.3\t
            1\t 115.6\t     -\t
"""


def test_matrices_peaks_and_latency_under_load_are_read() -> None:
    """A node without CPUs has a column and no row; a dash is absent; MB are decimal."""
    run = parse(OUTPUT)
    idle, bandwidths = run.idle_ns, run.bandwidth_bytes_per_s
    assert idle is not None and bandwidths is not None
    assert (idle.rows, idle.columns) == ((0, 1), (0, 1, 2))
    assert idle.cells == ((108.2, 195.7, 564.5), (195.9, 108.9, 650.1))
    assert list(bandwidths.cells[0][:2]) == pytest.approx([213.1394e9, 50.9234e9])
    assert bandwidths.cells[0][2] is None
    assert dict(run.peaks)["ALL Reads"] == pytest.approx(425.0971e9)
    assert [(row.delay, row.latency_ns) for row in run.loaded] == [(0, 230.31), (20000, 108.96)]
    assert run.loaded[0].bytes_per_s == pytest.approx(425.6559e9)
    assert (run.access, run.gaps) == ("random", ())


@pytest.mark.parametrize("header", ["Memory node", "Socket   "])
def test_older_headers_are_read(header: str) -> None:
    older = OUTPUT.replace("\t\tNuma node", "\t\tMemory node").replace("Numa node\t", header + "\t")
    assert parse(older).idle_ns == parse(OUTPUT).idle_ns


def test_prefetchers_that_stayed_on_are_said() -> None:
    text = OUTPUT.replace(
        "Measuring idle",
        "*** Unable to modify prefetchers (try executing 'modprobe msr')\n"
        "*** So, enabling random access for latency measurements\nMeasuring idle",
    )
    run = parse(text)
    assert run.prefetchers_were_on
    assert not run.gaps
    assert not parse(OUTPUT).prefetchers_were_on


def test_a_single_latency_is_read() -> None:
    run = parse(
        "Intel(R) Memory Latency Checker - v3.6\nCommand line parameters: --idle_latency\n\n"
        "Using buffer size of 200.000MiB\nEach iteration took 176.8 core clocks ( 57.2    ns)\n"
    )
    assert run.latency_ns == 57.2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a matrix, peak bandwidths or"),
        (OUTPUT.replace("\t 195.7", ""), "8: expected a node and 3 values"),
        (OUTPUT.replace("425097.1", "0.0"), "above 0"),
        (OUTPUT + OUTPUT, "one matrix of each kind"),
        (OUTPUT[OUTPUT.index("Measuring Loaded") :] * 2, "one row of delay 0"),
        ("Each iteration took 176 core clocks ( 57.2 ns)\n" * 2, "one latency"),
        (OUTPUT.replace("       1\t 195.9", "       0\t 195.9"), "one row of node 0"),
        (OUTPUT.replace("     1\t     2\t", "     1\t     1\t"), "each once"),
        (OUTPUT[: OUTPUT.index("       0\t 108")], "rows of a matrix"),
    ],
)
def test_output_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse(text)


@needs_shared
def test_an_output_of_the_published_form_is_read() -> None:
    run = parse(shared("samples/intel_mlc_v3.9_synth.txt").read_text())
    assert run.idle_ns is not None
    assert run.idle_ns.cells == ((82.2, 129.6), (131.1, 81.6))
    assert (len(run.peaks), len(run.loaded), run.gaps) == (5, 4, ())
