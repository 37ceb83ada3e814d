"""homenode recommend: one verdict per objective, from the best evidence there is. [I/O]"""

from homenode.cli.arguments.conclude import RecommendArguments
from homenode.cli.terminal import console, print_json
from homenode.decide.decide import decide_all, decide_for_machines
from homenode.decide.evidence.documents import publications
from homenode.decide.evidence.model import Evidence
from homenode.decide.evidence.sources import load_sources, published_hosts
from homenode.decide.machine_facts import facts_of_host, of_host
from homenode.decide.verdict import Verdicts
from homenode.formats import encode
from homenode.objective import Objective
from homenode.show.results_text import verdicts_text
from homenode.vm.sources import load_host


def recommend(asked: RecommendArguments) -> None:
    """Print the verdicts."""
    wanted = tuple(asked.objective or Objective)
    named = load_sources(asked.runs or [])
    loaded = tuple(run for one in named for run in one.runs)
    if asked.host is not None or asked.lspci is not None:
        machine = load_host(asked.host, lspci=asked.lspci)
        evidence = Evidence(publications(), of_host(loaded, machine))
        found = decide_all(evidence, facts_of_host(machine, publications()), wanted)
    else:
        printed = None if not loaded else {run.head.system for run in loaded}
        hosts = published_hosts(printed)
        found = decide_for_machines(Evidence(publications(), loaded), hosts, wanted)
    verdicts = Verdicts(found, tuple(reason for one in named for reason in one.skipped))
    if asked.json:
        print_json(encode("verdict", verdicts))
    else:
        console().print(verdicts_text(verdicts, notes=asked.notes))
