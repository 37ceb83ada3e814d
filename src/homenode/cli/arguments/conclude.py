"""Arguments of compare and report, and of list. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import ForceOption, HostOption, JsonOption
from homenode.objective import Objective
from homenode.option import Arg, Flag, Opt


class CompareArguments(Struct, frozen=True, kw_only=True):
    """Recommend a layout for each objective, and compare layouts: effects with intervals. If the
    interval does not decide, the answer is "cannot tell". Runs of one layout are combined; the boot
    is the unit of replication. With --host, for that host.

    Options:
      runs: Directories of results, also directories of directories, or of other tools' outputs as
        import reads them.
      objective: Decide by the metrics of this objective; multi-gpu, memory-bandwidth, latency,
        gpu-copy, throughput, density. Default: every objective, one after another.
      host: Recommend for this host alone. Default: for the hosts of the results.
      bare: A run on the host itself: results are also a percentage of bare metal.
      everything: Print also effects with intervals, caveats with their fixes, sources, more than
        three machines, single GPUs, nodes, message sizes and pairs of CPUs.

    Examples:
      homenode compare results/h200/default results/h200/pin-numa
      homenode compare demo/published/h200 --objective multi-gpu
    """

    runs: Annotated[tuple[str, ...], Arg("RUN...")]
    objective: Annotated[Objective | None, Opt("--objective", "NAME")] = None
    host: HostOption = None
    bare: Annotated[str | None, Opt("--bare-metal", "HOSTRUN")] = None
    everything: Annotated[bool, Flag("--explain")] = False
    json: JsonOption = False


class ReportArguments(Struct, frozen=True, kw_only=True):
    """Write results as one page: recommendations, effects, charts, caveats.

    Without arguments it reads ./results and writes results/report.html. Directories of the study's
    scripts and logs of other tools are read directly. Only runs of the same hardware
    are compared. The page needs no network.

    Options:
      runs: Directories of results, also directories of directories; directories of the study's
        scripts (results/<gpu>/<config>/) and logs of other tools, read as homenode import reads
        them. Default: results.
      output: File of the report; .html or .pdf. An older report is replaced. Default: report.html
        in the first directory.
      host: A capture of a host of these results: its picture, links and findings, for runs that
        name it, or for the one machine that names none. May be repeated. Default: captures stored
        beside host runs.
      title: The page's title. Default: Which layout to run: and the machines.
      appendix: Print in a PDF also every result, caveat and remark of each machine.
      csv: Print every result as a row of CSV.

    Examples:
      homenode report
      homenode report demo/published -o published.pdf
    """

    runs: Annotated[tuple[str, ...], Arg("[RUN]...")] = ()
    output: Annotated[Path | None, Opt("--output -o", "FILE")] = None
    host: Annotated[tuple[str, ...], Opt("--host", "SOURCE", complete="host_sources")] = ()
    title: Annotated[str | None, Opt("--title", "TEXT")] = None
    appendix: Annotated[bool, Flag("--appendix")] = False
    csv: Annotated[bool, Flag("--csv")] = False
    force: ForceOption = False
    json: JsonOption = False


class LayoutsArguments(Struct, frozen=True, kw_only=True):
    """List the layouts with their changes to a VM and their names in the published study.

    Examples:
      homenode list layouts
      homenode plan VM.xml --layout pin-numa
    """

    json: JsonOption = False


class HostsArguments(Struct, frozen=True, kw_only=True):
    """List the hosts that come with homenode, for --host.

    Options:
      everything: List the synthetic hosts too.
      explain: Describe each host.

    Examples:
      homenode list hosts --explain
      homenode show --host hgx-h100
    """

    everything: Annotated[bool, Flag("--all")] = False
    explain: Annotated[bool, Flag("--explain")] = False
    json: JsonOption = False


class FindingsArguments(Struct, frozen=True, kw_only=True):
    """Explain a finding: its meaning, cause, cost, fix and source.

    Without an argument, list the groups of findings.

    Options:
      finding: Id of a finding, as at the end of its head line; or a group, to list its ids.

    Examples:
      homenode list findings links
      homenode list findings pcie-link-narrow
    """

    finding: Annotated[str | None, Arg("[GROUP-OR-ID]", complete="finding_ids")] = None
    json: JsonOption = False
