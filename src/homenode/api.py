"""The Python interface, for `from homenode.api import ...`; see docs/reference/python.md. [I/O]

A domain is a file (a str or a Path) or its definition (bytes). A host is a Host or whatever
--host takes: a capture, a host.toml, a shipped host's name; None is this machine.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from homenode.decide.comparison import Comparison
from homenode.decide.recommendation import Recommendation
from homenode.errors import HomenodeError
from homenode.findings import Findings
from homenode.machine.topology import Host
from homenode.measure.results.model import Run
from homenode.objective import Objective
from homenode.plan.pipeline import PlannedFile
from homenode.vm.plan import Plan, Unplannable
from homenode.vm.plan_options import AUTO, PlanOptions, reject_objective
from homenode.vm.sources import load_host

__all__ = [
    "Comparison",
    "Findings",
    "HomenodeError",
    "Host",
    "Objective",
    "Plan",
    "PlanOptions",
    "PlannedFile",
    "Recommendation",
    "Run",
    "Unplannable",
    "compare",
    "decide",
    "diagnose",
    "load_host",
    "load_results",
    "plan",
    "plan_file",
    "result_rows",
    "to_json",
    "verify",
]

Domain = str | Path | bytes
HostSource = Host | str | None


def plan(domain: Domain, host: HostSource = None, options: PlanOptions | None = None) -> Plan:
    """Return the plan of a VM on a host. options: None = layout `auto`. Raises Unplannable if the
    VM does not fit the host, else HomenodeError."""
    return plan_file(domain, host, options).plan


def plan_file(
    domain: Domain, host: HostSource = None, options: PlanOptions | None = None
) -> PlannedFile:
    """Return the plan and the rewritten domain XML; nothing is written or defined."""
    from homenode.plan.pipeline import plan_file as plan_document
    from homenode.plan.planner import resolve_layout
    from homenode.vm.domain.read import read_vm

    content, source = _read_document(domain)
    machine = _read_host(host)
    plan_options = options or PlanOptions(AUTO)
    reject_objective(plan_options)
    resolved_options = resolve_layout(read_vm(content, source), plan_options, machine).options
    return plan_document(content, source, resolved_options, machine)


def verify(domain: Domain, host: HostSource = None, plan: Plan | None = None) -> Findings:
    """Return the findings on a domain definition: its consistency, its host, and its plan."""
    from homenode.check.domain.verification import verify_document
    from homenode.findings import sort_findings
    from homenode.vm.domain.read import open_domain
    from homenode.vm.domain.schema import parse_with_libvirt, validate

    document = open_domain(*_read_document(domain))
    errors, gap = validate(document.to_bytes())
    parse_result = parse_with_libvirt(document) if errors else None
    verification = verify_document(
        document, plan=plan, host=_read_host(host), schema_errors=errors, parse_result=parse_result
    )
    skipped_checks = (*([str(gap)] if gap else []), *verification.not_checked)
    return replace(
        verification, findings=sort_findings(verification.findings), not_checked=skipped_checks
    )


def diagnose(host: HostSource = None, domain: Domain | None = None) -> Findings:
    """Return the findings of `homenode doctor` on a host and a domain on it."""
    from homenode.check.doctor.diagnosis import diagnose as find
    from homenode.vm.domain.read import open_domain

    document = None if domain is None else open_domain(*_read_document(domain))
    return find(_read_host(host), document)


def decide(host: HostSource, objective: Objective, results: Sequence[str] = ()) -> Recommendation:
    """Recommend a layout on a host for an objective. results: directories that override the
    table."""
    from homenode.decide.machine_facts import assign_runs, collect_host_facts
    from homenode.decide.recommendation import decide as decide_on

    machine = _read_host(host)
    runs = assign_runs(load_results(*results), machine)
    return decide_on(runs, collect_host_facts(machine), objective)


def compare(directories: Sequence[str], objective: Objective | None = None) -> Comparison:
    """Compare layouts, with intervals; the first directory's layout is the baseline."""
    from homenode.decide.alternative import group_by_argument
    from homenode.decide.compare import compare as compare_alternatives
    from homenode.measure.imported_files import load_sources

    sources = load_sources(directories)
    gaps = [gap for source in sources for gap in source.skipped]
    groups = group_by_argument([(source.argument, source.runs) for source in sources])
    return replace(compare_alternatives(groups, objective), skipped=tuple(gaps))


def load_results(*directories: str) -> tuple[Run, ...]:
    """Return the runs of results directories."""
    from homenode.measure.imported_files import load_sources

    return tuple(run for source in load_sources(directories) for run in source.runs)


def result_rows(*directories: str) -> list[dict[str, Any]]:
    """Return every result as a row for pandas.DataFrame; see docs/reference/formats/rows.md."""
    from homenode.show.report.inputs import gather
    from homenode.show.report.machine import build_machines, list_rows

    inputs = gather(list(directories), ())
    machines = build_machines(inputs.runs, inputs.stored, inputs.hosts)
    return [row for machine in machines for row in list_rows(machine)]


def to_json(value: Host | Plan | Findings | Comparison) -> str:
    """Return a value in its documented format (docs/reference/formats), as --json prints it."""
    from homenode.formats import encode
    from homenode.machine.topology import summarise
    from homenode.plan.stored import encode_plan

    if isinstance(value, Plan):
        return encode_plan(value)
    if isinstance(value, Host):
        return encode("host", value, {"summary": summarise(value)})
    return encode("findings" if isinstance(value, Findings) else "comparison", value)


def _read_document(domain: Domain) -> tuple[bytes, str]:
    """Return a domain's definition, and its name in messages."""
    from homenode.safe.input_files import read_input

    if isinstance(domain, bytes):
        return domain, "domain"
    return read_input(domain, "a domain XML"), str(domain)


def _read_host(source: HostSource) -> Host:
    return source if isinstance(source, Host) else load_host(source)
