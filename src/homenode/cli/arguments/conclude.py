"""What is asked of recommend, compare and report, and of list. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import ForceOption, HostOption, JsonOption, LspciOption
from homenode.objective import Objective
from homenode.opt import Arg, Flag, Opt


class RecommendArguments(Struct, frozen=True, kw_only=True):
    """Say which layout to run for each objective, on what evidence.

    With --host, for that host: by results of it, of its kind, published ones, or its topology.

    Examples:
      homenode recommend
      homenode recommend results --host this-host.tar.gz --objective collective
    """

    runs: Annotated[
        tuple[str, ...],
        Arg("[RUN]...", "Results folders, or published:SYSTEM. Default: published."),
    ] = ()
    objective: Annotated[
        tuple[Objective, ...],
        Opt("--objective", "NAME", "What the VM is for. Repeatable. Default: every one."),
    ] = ()
    host: HostOption = None
    lspci: LspciOption = None
    notes: Annotated[bool, Flag("--notes", "Also what is wrong with published figures.")] = False
    json: JsonOption = False


class CompareArguments(Struct, frozen=True, kw_only=True):
    """Compare layouts by their results: effects with intervals.

    Where the interval does not decide, the answer is "cannot tell". Runs of one layout are
    combined; the boot is the unit of replication.

    Examples:
      homenode compare results/h200/default results/h200/pin-numa
      homenode compare published:H200 --objective collective
    """

    runs: Annotated[
        tuple[str, ...],
        Arg(
            "RUN...",
            "Results folders, the first one's layout being the baseline; or published:SYSTEM.",
        ),
    ]
    objective: Annotated[
        Objective | None,
        Opt(
            "--objective",
            "NAME",
            "What the VM is for: its metrics decide. Default: every objective's.",
        ),
    ] = None
    bare: Annotated[
        str | None,
        Opt(
            "--bare",
            "HOSTRUN",
            "A run on the host itself, on the plan's PUs and nodes: percent of bare metal.",
        ),
    ] = None
    everything: Annotated[bool, Flag("--all", "Also single devices, nodes and sizes.")] = False
    json: JsonOption = False


class ReportArguments(Struct, frozen=True, kw_only=True):
    """Write results as one page: verdicts, effects, charts, doubts.

    Without arguments: of ./results, into results/report.html. Folders of the study's
    scripts and logs of other tools are read as they are. Only runs of the same hardware
    are compared. The page needs no network.

    Examples:
      homenode report
      homenode report --published -o published.pdf
    """

    runs: Annotated[
        tuple[str, ...],
        Arg(
            "[RUN]...",
            "Folders of results or of other tools' logs; published:SYSTEM. Default: results.",
        ),
    ] = ()
    output: Annotated[
        Path | None,
        Opt(
            "--output -o",
            "FILE",
            "The page: .html or .pdf. Default: report.html in the first folder.",
        ),
    ] = None
    published: Annotated[
        bool, Flag("--published", "Also everything that others have published.")
    ] = False
    host: Annotated[
        tuple[str, ...], Opt("--host", "SOURCE", "A host of these results, to draw. Repeatable.")
    ] = ()
    title: Annotated[str, Opt("--title", "TEXT", "Title of the page.")] = "homenode report"
    appendix: Annotated[
        bool, Flag("--appendix", "In a PDF: also every figure, doubt and remark of each machine.")
    ] = False
    csv: Annotated[bool, Flag("--csv", "Print every figure as a row of CSV.")] = False
    force: ForceOption = False
    json: JsonOption = False
    parquet: Annotated[
        Path | None, Opt("--parquet", "FILE", "Write the same rows as Parquet; needs pyarrow.")
    ] = None


class LayoutsArguments(Struct, frozen=True, kw_only=True):
    """List the layouts: what each changes in a VM, and its name in the published study.

    Examples:
      homenode list layouts
      homenode plan VM.xml --layout pin-numa
    """

    json: JsonOption = False


class HostsArguments(Struct, frozen=True, kw_only=True):
    """List the hosts that come with homenode, for --host.

    Examples:
      homenode list hosts
      homenode show --host hgx-h100
    """

    everything: Annotated[
        bool, Flag("--all", "Also the made-up ones, each with one unusual property.")
    ] = False
    json: JsonOption = False


class FindingsArguments(Struct, frozen=True, kw_only=True):
    """Explain a finding: what it means, how it is measured, what it costs and how to fix it.

    Without an id, list all.

    Examples:
      homenode list findings
      homenode list findings pcie-link-narrow
    """

    finding: Annotated[
        str | None,
        Arg(
            "[FINDING-ID]",
            "An id as `homenode doctor` prints it: pcie-link-narrow.",
            complete="finding_ids",
        ),
    ] = None
    json: JsonOption = False
