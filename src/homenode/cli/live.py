"""homenode verify --live: a running domain from outside. [I/O]"""

from pathlib import Path

from homenode.cli.terminal import console, print_json, read_file


def verify_live(name: str, connect: str, plan: Path | None, *, as_json: bool) -> None:
    """Print the findings on a running domain of this machine; exit 1 where there are bad ones.

    plan: a saved plan for this host; None = the domain's own document. Raises as
    verify_running_domain, and InputError for a plan that was made for another host.
    """
    from homenode.findings import are_bad
    from homenode.verify.live.domain import verify_running_domain

    made = None
    if plan is not None:
        from homenode.plan.stored import read_plan_for
        from homenode.sources import load_host

        content = read_file(plan, "a saved plan", hint="homenode plan --save-plan P.json")
        made = read_plan_for(load_host(None), content, str(plan))
    findings = verify_running_domain(name, connect, made)
    if as_json:
        from homenode.formats import encode

        print_json(encode("findings", findings))
    else:
        from homenode.report.findings_text import findings_text

        console().print(findings_text(findings))
    if are_bad(findings.findings):
        raise SystemExit(1)
