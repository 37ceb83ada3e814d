"""homenode show: the host as a tree and as a picture. [I/O]"""

from homenode.cli.arguments.place import ShowArguments
from homenode.cli.terminal import (
    STANDARD_OUTPUT,
    check_can_write,
    console,
    note_written,
    print_json,
    write_text,
)
from homenode.errors import UsageError
from homenode.formats import encode
from homenode.input_files import read_input
from homenode.machine.topology import Host, summarise
from homenode.vm.sources import load_host


def show(asked: ShowArguments) -> None:
    """Print the host, or draw it."""
    if asked.plan is not None and asked.svg is None:
        raise UsageError("--plan: expected --svg as well, found none")
    if asked.json and asked.svg == STANDARD_OUTPUT:
        raise UsageError("give either --json or --svg -, not both")
    check_can_write(asked.svg, force=asked.force)
    host = load_host(asked.host, lspci=asked.lspci)
    if asked.svg is not None:
        write_text(asked.svg, _drawn(host, asked))
        note_written(asked.svg)
    if asked.json:
        print_json(encode("host", host, {"summary": summarise(host)}))
    elif asked.svg is None:
        from homenode.show.host_tree import host_tree

        console().print(host_tree(host, asked.everything))


def _drawn(host: Host, asked: ShowArguments) -> str:
    from homenode.plan.stored import read_plan_for
    from homenode.show.topology_map import topology_map

    if asked.plan is None:
        return topology_map(host, None)
    saved = read_input(asked.plan, "a saved plan")
    return topology_map(host, read_plan_for(host, saved, str(asked.plan)))
