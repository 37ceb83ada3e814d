"""homenode slurm: GPU nodes under Slurm: one file per subcommand. [I/O]"""

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="GPU nodes under Slurm: are jobs, configuration and bindings on the GPUs' nodes.",
)
