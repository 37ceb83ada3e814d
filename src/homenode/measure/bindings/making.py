"""Study making: a new study from what the user wants and what Slurm says of its nodes. [I/O]"""

from homenode.errors import UsageError
from homenode.measure.bindings import queue_client
from homenode.measure.bindings.experiments import (
    StudyWishes,
    choose_nodes,
    experiments_for,
    look_experiments,
    nodes_to_bind_to,
)
from homenode.measure.bindings.progress import Study
from homenode.sources import load_host


def made_study(wishes: StudyWishes, host: str | None, id: str) -> Study:
    """A study of these nodes. host: what they are; None = a job on each looks first.

    What the host cannot do is refused before Slurm is asked for anything. Raises UsageError,
    InputError for the host, NoAnswerError, ToolError.
    """
    described = None if host is None else load_host(host)
    if described is not None and not nodes_to_bind_to(described, wishes):
        raise UsageError(f"{host}: expected NUMA nodes with CPUs and memory, found none")
    whole, shared = choose_nodes(queue_client.nodes(), wishes)
    if described is None:
        return Study(id, wishes, whole, shared, None, look_experiments(whole))
    hosts = {node.name: described for node in whole}
    planned = experiments_for(whole, shared, hosts, wishes)
    return Study(id, wishes, whole, shared, host, (), planned)
