"""homenode slurm: GPU nodes under Slurm: one file per subcommand. [I/O]"""

import typer

from homenode.cli import slurm_audit, slurm_bind, slurm_check, slurm_report, slurm_study

app = typer.Typer(
    no_args_is_help=True,
    help="GPU nodes under Slurm: are jobs, configuration and bindings on the GPUs' nodes.",
)
app.command("audit")(slurm_audit.audit)
app.command("study")(slurm_study.study)
app.command("report")(slurm_report.report)
app.command("check")(slurm_check.check)
app.command("bind")(slurm_bind.bind)
