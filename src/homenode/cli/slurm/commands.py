"""homenode slurm: GPU nodes under Slurm: one file per subcommand. [I/O]"""

import typer

from homenode.cli.slurm import audit as slurm_audit
from homenode.cli.slurm import bind as slurm_bind
from homenode.cli.slurm import check as slurm_check
from homenode.cli.slurm import report as slurm_report
from homenode.cli.slurm import study as slurm_study

app = typer.Typer(
    no_args_is_help=True,
    help="GPU nodes under Slurm: are jobs, configuration and bindings on the GPUs' nodes.",
)
app.command("audit")(slurm_audit.audit)
app.command("study")(slurm_study.study)
app.command("report")(slurm_report.report)
app.command("check")(slurm_check.check)
app.command("bind")(slurm_bind.bind)
