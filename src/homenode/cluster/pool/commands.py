"""homenode pool: VMs that fit on many hosts, the host for the next VM, captures. [I/O]"""

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from homenode.cli.plan import (
    apply_plans,
    check_tuned_output,
    choose_by,
    warn_slow_links,
    write_definition,
)
from homenode.cli.terminal import (
    STANDARD_OUTPUT,
    check_can_write,
    choose_permissions,
    counting,
    get_error_console,
    make_console,
    note,
    note_written,
    print_json,
    write_text,
)
from homenode.cluster.arguments import (
    PoolCaptureArguments,
    PoolPlaceArguments,
    PoolShowArguments,
)
from homenode.cluster.pool.fits import DEFAULT_SIZES, examine_pool, list_passable_gpus, parse_size
from homenode.cluster.pool.place import PoolPlace, PoolRanking, rank_hosts, reject_ambiguous_devices
from homenode.cluster.pool.text import (
    format_no_place,
    format_order,
    format_places,
    format_pool,
    format_unknown,
)
from homenode.errors import (
    FINDINGS,
    NOT_KNOWN,
    UNPLANNABLE,
    HomenodeError,
    HostError,
    InputError,
    NotKnownError,
    UsageError,
    exclusive,
    unknown,
)
from homenode.findings import Gap
from homenode.formats import encode
from homenode.machine.topology import Host, reject_unshown
from homenode.plan.pipeline import PlannedFile, plan_file, plan_for_target
from homenode.plan.planner import resolve_layout
from homenode.plan.stored import encode_plan, encode_refusal
from homenode.safe.durable import PRIVATE, replace_file
from homenode.safe.input_files import read_input
from homenode.show.explain import explain_sections
from homenode.show.plan_text import plan_parts
from homenode.text import command_line, plural
from homenode.vm.host_sources import NamedHost, NamedHosts, Progress, read_host_over_ssh, read_hosts
from homenode.vm.plan import LIBVIRT, Unplannable, is_critical
from homenode.vm.plan_options import PlanOptions, reject_objective
from homenode.vm.targets.registry import VmFile, read_vm


def show(arguments: PoolShowArguments) -> None:
    """Print the free resources, and the number of VMs of each size that fit."""
    sizes = tuple(map(parse_size, arguments.sizes))
    with counting("reading hosts") as progress:
        named_hosts = _drop_coreless(read_hosts(arguments.pool, progress))
    after = apply_plans(tuple(entry.host for entry in named_hosts.hosts), arguments.after)
    named_hosts = NamedHosts(_replace_hosts(named_hosts.hosts, after), named_hosts.unread)
    if not sizes and any(list_passable_gpus(host) for host in after):
        sizes = DEFAULT_SIZES
    with counting("planning") as progress:
        pool = examine_pool(named_hosts, sizes, progress)
    if arguments.json:
        print_json(encode("pool", pool))
        _note_unread(named_hosts)
    else:
        make_console().print(format_pool(pool, by_node=arguments.explain))
    _exit_with_unread(named_hosts)


def place(arguments: PoolPlaceArguments) -> None:
    """Rank the hosts, and plan for the first."""
    document, options, output = arguments.document, arguments.options, arguments.output
    reject_objective(options)
    if STANDARD_OUTPUT in (output, arguments.save_plan) and (
        arguments.json or output == arguments.save_plan
    ):
        raise UsageError("-: expected one output on standard output, found several")
    check_can_write(output, force=True)
    check_can_write(arguments.save_plan)
    check_tuned_output(output)
    original = read_input(document, "a domain XML", hint="virsh dumpxml NAME > VM.xml")
    vm = read_vm(original, document)
    guest = vm.guest
    choose = choose_by(arguments.results)
    with counting("reading hosts") as progress:
        named_hosts = _drop_coreless(read_hosts(arguments.pool, progress))
    after = apply_plans(tuple(entry.host for entry in named_hosts.hosts), arguments.after)
    hosts = _select_hosts(_replace_hosts(named_hosts.hosts, after), arguments)
    reject_ambiguous_devices(hosts, guest)

    def options_on(entry: NamedHost) -> PlanOptions:
        return resolve_layout(guest, options, entry.host, choose).options

    with counting("planning") as progress:
        ranking = rank_hosts(hosts, guest, options_on, progress)
    best = tuning = None
    for at, ranked in enumerate(ranking.hosts):
        try:
            tuning = _plan_on(vm, ranked)
            best, ranking = ranked, replace(ranking, hosts=ranking.hosts[at:])
            break
        except Unplannable as refusal:  # hosts of one model differ by less than 1 GiB
            note(f"{ranked.entry.name}: {refusal.message}")
    if best is None or tuning is None:
        refusals = [hosts.refusal for hosts in ranking.refusing if hosts.refusal is not None]
        if arguments.json and refusals:
            print_json(encode_refusal(refusals[0]))
        get_error_console().print(format_no_place(guest.name, ranking.refusing))
        _note_unread(named_hosts)
        codes = {hosts.exit_code for hosts in ranking.refusing}
        raise SystemExit(NOT_KNOWN if NOT_KNOWN in codes else UNPLANNABLE)
    lines = []
    if output is not None:
        lines += write_definition(tuning, original, output, choose_permissions(document))
    if arguments.save_plan is not None:
        write_text(arguments.save_plan, encode_plan(tuning.plan))
    if arguments.json:
        print_json(encode_plan(tuning.plan))
    else:
        reasons = resolve_layout(guest, options, best.entry.host, choose).reasons
        gaps = [(ranked.entry.name, ranked.entry.host.gaps) for ranked in ranking.hosts[1:]]
        _print_places(arguments, ranking, tuning, reasons, format_unknown(gaps))
    for line in (*lines, *tuning.notes):
        note(line)
    if arguments.save_plan is not None:
        note_written(arguments.save_plan)
    warn_slow_links(best.entry.host, options)
    _note_unread(named_hosts)
    _exit_with_unread(named_hosts, or_if=is_critical(tuning.plan))


def _plan_on(vm: VmFile, pool_place: PoolPlace) -> PlannedFile:
    if vm.kind == LIBVIRT:
        assert vm.content is not None, "it is of a file"
        return plan_file(vm.content, vm.source, pool_place.options, pool_place.entry.host)
    assert vm.kind is not None, "it is of a file"
    return plan_for_target(vm, pool_place.options, pool_place.entry.host, vm.kind)


def _print_places(
    arguments: PoolPlaceArguments,
    ranking: PoolRanking,
    tuning: PlannedFile,
    reasons: tuple[str, ...],
    unknown: Sequence[str],
) -> None:
    best, everything = ranking.hosts[0], arguments.explain
    host, order = best.entry.host, format_order(best)
    step = _format_next_step(best, arguments, tuning.target)
    parts = plan_parts(tuning.plan_to_show, host, reasons, step, order=order, unknown=unknown)
    if everything:
        parts += explain_sections(tuning.plan_to_show, host)
    to_stdout = STANDARD_OUTPUT in (arguments.output, arguments.save_plan)
    screen = get_error_console() if to_stdout else make_console()
    screen.print(format_places(ranking, tuning.plan, parts, everything=everything))


def _format_next_step(best: PoolPlace, arguments: PoolPlaceArguments, target: str) -> str:
    if arguments.output == STANDARD_OUTPUT:
        return ""
    if target != LIBVIRT:
        return "" if arguments.output else "the same command with -o FILE"
    if arguments.output is None:
        return "the same command with -o tuned.xml"
    return command_line("virsh", "-c", best.entry.libvirt_uri, "define", arguments.output)


def _drop_coreless(named_hosts: NamedHosts) -> NamedHosts:
    """Return the hosts whose sources show cores. Raises NotKnownError if there are no hosts."""
    hosts, unread = [], list(named_hosts.unread)
    for number, entry in enumerate(named_hosts.hosts, start=1):
        try:
            reject_unshown(entry.host, "cores")
            hosts.append(entry)
        except NotKnownError as error:
            if number == len(named_hosts.hosts) and not hosts:
                raise
            unread.append(Gap(entry.source, error.message))
    return NamedHosts(tuple(hosts), tuple(unread))


def _replace_hosts(entries: Sequence[NamedHost], hosts: Sequence[Host]) -> tuple[NamedHost, ...]:
    pairs = zip(entries, hosts, strict=True)
    return tuple(replace(entry, host=host) for entry, host in pairs)


def _select_hosts(
    entries: Sequence[NamedHost], arguments: PoolPlaceArguments
) -> Sequence[NamedHost]:
    """Return the hosts that --on names; all for none. Raises UsageError."""
    names = arguments.among
    pools = (word for source in arguments.pool for word in ("--pool", source))
    hint = command_line("homenode", "pool", "show", *pools)
    hosts = {entry.name: entry for entry in entries}
    for name in names:
        if name not in hosts:
            raise unknown("host", name, hosts, hint, "--on: ")
    return [hosts[name] for name in dict.fromkeys(names)] if names else entries


def _note_unread(hosts: NamedHosts) -> None:
    for unread in hosts.unread:
        note(f"not read  {unread}")


def _exit_with_unread(hosts: NamedHosts, *, or_if: bool = False) -> None:
    if hosts.unread or or_if:
        raise SystemExit(FINDINGS)


def capture(arguments: PoolCaptureArguments) -> None:
    if bool(arguments.servers) == (arguments.hosts is not None):
        if arguments.servers:
            raise exclusive("argument HOST", "--hosts")
        raise UsageError("missing argument HOST", hint="or --hosts FILE, a list of hosts")
    lines, source = list(arguments.servers), "HOST"
    if arguments.hosts is not None:
        content = read_input(arguments.hosts, "a list of hosts").decode("utf-8", "replace")
        lines, source = content.splitlines(), str(arguments.hosts)
    listed_hosts, refusals = read_list(lines, source)
    with counting("reading hosts") as progress:
        results = capture_hosts(
            listed_hosts,
            arguments.output,
            progress,
            jobs=arguments.jobs,
            timeout_s=arguments.timeout,
            overwrite=arguments.again,
        )
    failures = (*refusals, *results.failures)
    for failure in failures:
        note(f"not read  {failure}")
    note(
        f"wrote {arguments.output}: {plural(results.hosts, 'host')}, {results.read} read now, "
        f"{len(failures)} failed"
    )
    if results.hosts:
        note(f"next: {command_line('homenode', 'pool', 'show', '--pool', arguments.output)}")
    if failures:
        raise SystemExit(FINDINGS)


_SERVER = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9_.:@%\[\]+-]{0,255}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,254}", re.ASCII)


class CapturedHosts(Struct, frozen=True, kw_only=True):
    """Number of hosts in the directory, number read by this call, and unreadable hosts."""

    hosts: int
    read: int
    failures: tuple[Gap, ...]


def capture_hosts(
    server_of: Mapping[str, str],
    directory: Path,
    progress: Progress,
    *,
    jobs: int,
    timeout_s: float,
    overwrite: bool = False,
) -> CapturedHosts:
    """Read hosts into NAME.json of the directory, for this user alone. Each is written as soon as
    it was read: after an interruption the same call reads the missing hosts. server_of: by name.
    overwrite: also read hosts that the directory has. Raises HostError for the directory, OSError
    for a file in it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"{directory}: cannot create the directory: {error.strerror}") from None
    files = {name: directory / f"{name}.json" for name in server_of}
    missing = [name for name, file in files.items() if overwrite or not file.exists()]
    failures: list[Gap] = []
    with ThreadPoolExecutor(max_workers=jobs) as threads:
        reads = {
            threads.submit(_capture, name, server_of[name], files[name], timeout_s): name
            for name in missing
        }
        try:
            for number, read in enumerate(as_completed(reads), start=1):
                reason = read.result()
                if reason is not None:
                    failures.append(Gap(server_of[reads[read]], reason))
                progress(number, len(missing))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
    return CapturedHosts(
        hosts=sum(file.exists() for file in files.values()),
        read=len(missing) - len(failures),
        failures=tuple(sorted(failures, key=lambda failure: failure.subject)),
    )


def _capture(name: str, server: str, file: Path, timeout_s: float) -> str | None:
    """Write the host; return the reason if it cannot be read."""
    try:
        host = replace(read_host_over_ssh(server, timeout_s), name=name)
    except HomenodeError as error:
        return error.message.removeprefix(f"{server}: ")
    replace_file(file, encode("host", host).encode(), PRIVATE)
    return None


def read_list(lines: Iterable[str], source: str) -> tuple[dict[str, str], tuple[Gap, ...]]:
    """Return the ssh addresses by name of lines `[USER@]HOST[:PORT] [name=NAME]`, and the rejected
    lines; # begins a comment. Raises InputError if no line names a host."""
    server_of: dict[str, str] = {}
    refusals: list[Gap] = []
    for number, line in enumerate(lines, start=1):
        words = line.removeprefix("\ufeff").partition("#")[0].split()
        if not words:
            continue
        server = words[0]
        name = re.sub(r":[0-9]{1,5}\Z", "", server.rpartition("@")[2])
        host_name = words[1].removeprefix("name=") if words[1:2] else name
        is_formed = len(words) == 1 or (len(words) == 2 and words[1].startswith("name="))
        if not (is_formed and _SERVER.fullmatch(server) and _NAME.fullmatch(host_name)):
            reason = f"expected [USER@]HOST[:PORT] [name=NAME], found {line.strip()[:80]!r}"
        elif host_name in server_of:
            reason = f"duplicate name {host_name!r}: {server_of[host_name]} has it"
        else:
            server_of[host_name] = server
            continue
        refusals.append(Gap(f"{source}:{number}", reason))
    if not server_of:
        first = refusals[0] if refusals else Gap(source, "no hosts in it")
        raise InputError(str(first))
    return server_of, tuple(refusals)
