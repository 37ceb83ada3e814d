"""homenode slurm: GPU nodes under Slurm: one file per subcommand. [I/O]"""

import typer

from homenode.cli.help import HelpCommand, HelpGroup
from homenode.cli.slurm import audit as slurm_audit
from homenode.cli.slurm import bind as slurm_bind
from homenode.cli.slurm import check as slurm_check
from homenode.cli.slurm import report as slurm_report
from homenode.cli.slurm import study as slurm_study

app = typer.Typer(
    cls=HelpGroup,
    no_args_is_help=True,
    help="""Check and bind GPU jobs under Slurm: where jobs run, configuration files, ranks.

    Examples:
      homenode slurm audit
      homenode slurm check gres.conf slurm.conf --host node.tar.gz
    """,
)
app.command("audit", cls=HelpCommand)(slurm_audit.audit)
app.command("study", cls=HelpCommand)(slurm_study.study)
app.command("report", cls=HelpCommand)(slurm_report.report)
app.command("check", cls=HelpCommand)(slurm_check.check)
app.command("bind", cls=HelpCommand)(slurm_bind.bind)
