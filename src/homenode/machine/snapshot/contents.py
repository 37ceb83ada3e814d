"""Contents: the one table of every path and every command that homenode reads, and why.

The same table captures (gather.py, collector.py) and validates: a file that does
not have its form is left out of a capture, so that nothing foreign comes along.

Source: Documentation/ABI/{stable,testing}/sysfs-* and Documentation/filesystems/proc.rst of the
Linux kernel 6.12; for each tool see tools/.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from functools import cache, cached_property
from statistics import median_low
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct

from homenode.input_files import package_text
from homenode.units import first_number


class Kind(StrEnum):
    """What a path is."""

    FILE = "file"
    LINK = "link"
    FOLDER = "folder"  # only that it is there
    CONFIG = "config"  # PCI configuration space, binary; of bridges only
    TABLE = "table"  # an ACPI table, binary


_BDF = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_WAY = r"(?:[A-Za-z0-9_.:@-]{1,80}/){0,40}"  # pci0000:17/0000:17:01.0/, platform/.../


class Form(Enum):
    """What the text of a file looks like; the value is a regular expression."""

    NUMBER = r"-?\d{1,20}"
    HEX = r"(?:0x)?[0-9a-fA-F]{1,8}"
    # PUs or nodes: "0-3,8"; nothing on a node without CPUs; "(null)" where nohz_full= is not given
    LIST = r"\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*|\(null\)|"
    MASK = r"[0-9a-f]{1,8}(?:,[0-9a-f]{1,8}){0,2047}"
    NUMBERS = r"\d{1,6}(?: +\d{1,6})*"
    WORD = r"[A-Za-z][A-Za-z0-9_-]{0,30}|\d{1,2}"  # "on", "Unified", "amd-pstate-epp"; SMT 4
    COUNTS = r"[A-Za-z_]{1,40} \d{1,20}"  # each line: "RxErr 0"
    CHOICE = r"\[?[a-z+]{2,15}\]?(?: \[?[a-z+]{2,15}\]?){1,6}"  # "always [madvise] never"
    SIZE = r"\d{1,12}[KMG]?"
    SPEED = r"(?:\d{1,3}(?:\.\d)? GT/s(?: PCIe)?|Unknown(?: speed)?)"
    NAME = r"[^\n]{0,400}"  # one line of free text
    LINES = r"[^\n]{0,401}"  # each line
    COMMAND_LINE = r"[^\n]{0,16384}"
    RESOURCE = r"0x[0-9a-f]{16} 0x[0-9a-f]{16} 0x[0-9a-f]{16}"  # each line
    FIELDS = r"[A-Za-z0-9_()][A-Za-z0-9_() ]{0,60}\t*:[^\n]{0,8000}"  # each line: "key: value"
    NODE_MEMINFO = r"Node \d+ [A-Za-z0-9_()]{1,40}:\s+\d+(?: kB)?"  # each line

    # Where links lead: to names that the kernel gives
    TO_DAX = rf"(?:\.\./)+devices/{_WAY}dax\d{{1,4}}\.\d{{1,4}}"
    TO_MEDIATED = rf"(?:\.\./)+devices/{_WAY}{_UUID}"
    TO_MEDIATED_TYPE = r"(?:\.\./)+mdev_supported_types/[A-Za-z0-9_-]{1,60}"
    TO_POLICY = r"\.\./cpufreq/policy\d{1,6}"
    TO_NODE = r"(?:\.\./)+node\d{1,6}"
    TO_DEVICE = rf"(?:\.\./)+(?:devices/{_WAY})?{_BDF}"
    TO_DRIVER = r"(?:\.\./)+bus/[a-z]{2,12}/drivers/[A-Za-z0-9_-]{1,40}"
    TO_GROUP = r"(?:\.\./)+kernel/iommu_groups/\d{1,8}"
    TO_BUS = rf"(?:\.\./)+devices/{_WAY}pci_bus/[0-9a-f]{{4,8}}:[0-9a-f]{{2}}"
    TO_IOMMU = rf"(?:\.\./)+devices/{_WAY}iommu/[a-z]{{2,8}}[a-z0-9._-]{{0,30}}"

    def matches(self, text: str) -> bool:
        """True where the whole text, but for white space around it, has the form.

        White space alone has every form: a file may say nothing.
        """
        # By line, because a pattern that repeats over lines takes 2^n steps to say no.
        parts = text.strip().split("\n") if self in _BY_LINE else (text.strip(),)
        compiled = _compiled(self)
        return all(not part or compiled.fullmatch(part.rstrip()) for part in parts)


_BY_LINE = frozenset({Form.LINES, Form.RESOURCE, Form.FIELDS, Form.NODE_MEMINFO, Form.COUNTS})
_compiled = cache(lambda form: re.compile(form.value, re.ASCII))


class PathRule(Struct, frozen=True):
    """Paths that are read: a glob of the shell, one component at a time.

    keep: where given, only lines that begin so are captured (the rest of /proc/self/status, say,
    is private).
    unless: a glob that says the same, better: this one is only read where that one matches nothing,
    as in trees of /sys from old kernels or packed by other programs.
    """

    glob: str
    kind: Kind
    form: Form
    why: str
    keep: tuple[str, ...] = ()
    unless: str | None = None


class ToolCommand(Struct, frozen=True):
    """A tool whose output is read.

    spellings: the argv, and others to try where the first program is not there.
    each: where given, its output is a list of words, and the tool runs once for each of them, the
    word as its last argument; the outputs stand one after the other in <wrapped> tags.
    """

    name: str
    spellings: tuple[tuple[str, ...], ...]
    why: str
    timeout_s: int = 30
    each: tuple[str, ...] = ()
    wrapped: str = ""


BRIDGE_CLASS = "0x0604"
"""How the class of a PCI-to-PCI bridge begins, in its file; every PCIe port is one."""

_LINES = re.compile(r'"([^"]+)"')


def table(name: str) -> list[str]:
    """The rows of one of this folder's tables."""
    lines = package_text("machine", "snapshot", name).splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def words(section: str) -> frozenset[str]:
    """The words of a section of words.txt."""
    _, _, rest = "\n".join(table("words.txt")).partition(f"[{section}]\n")
    return frozenset(rest.partition("[")[0].split())


UNREAD = words("unread")


def _each(names: str) -> list[str]:
    """Of braces, each name."""
    before, _, rest = names.partition("{")
    several, _, after = rest.partition("}")
    return [f"{before}{one}{after}" for one in several.split(",")]


def _paths() -> Iterator[PathRule]:
    """Of each row one rule, or one for each name in its braces."""
    rows = table("paths.txt")
    for row, below in zip(rows, (*rows[1:], ""), strict=True):
        if row.startswith(" "):
            continue
        head, _, why = row.partition(" | ")
        kind, form, path, *rest = head.split()
        folder, better = path.rpartition("/")[0], rest[1] if rest else None
        unless = better and (better if better.startswith("/") else f"{folder}/{better}")
        keep = tuple(_LINES.findall(below.replace("\\t", "\t"))) if below[:1] == " " else ()
        for glob in _each(path):
            yield PathRule(glob, Kind(kind), Form[form], why, keep, unless)


class StateRule(Struct, frozen=True, kw_only=True, dict=True):
    """A row of states.txt. folders: glob of the parts' folders; a tool's name. form: None of what a
    tool says. is_recorded: in a baseline. few, times: a count is wrong from so many on, and from so
    many times what others have."""

    group: str
    folders: str
    glob: str
    form: Form | None
    judged: str
    few: int = 0
    times: float = 20
    is_info: bool = False
    is_recorded: bool = True
    topic: str = ""

    @cached_property
    def pattern(self) -> "re.Pattern[str]":
        """Of its states' names."""
        return re.compile(self.glob if self.form is None else state_pattern(self.glob), re.ASCII)

    def name_of(self, path: str) -> str:
        """The state's name, of a path below a part's folder."""
        *folders, name = path.split("/")
        parts = zip(self.glob.split("/"), folders, strict=False)
        return "/".join([*(part for glob, part in parts if not _is_any(glob)), name])


def state_pattern(glob: str) -> str:
    """Of the names of a file's states: of what the file is about, not of which interface it is.

    >>> state_pattern("net/e*/mtu"), state_pattern("cpuidle/state[0-9]*/disable")
    ('net/mtu(?: .*)?', 'cpuidle/state[0-9]+/disable(?: .*)?')
    >>> state_pattern("net/*/[a-z]*")
    'net/[^/ ]+(?: .*)?'
    """
    *folders, last = glob.split("/")
    kept = [part for part in folders if not _is_any(part)]
    name = "/".join([*kept, "[^/ ]+" if _is_any(last) else last]).replace("[0-9]*", "[0-9]+")
    return f"{name}(?: .*)?"


def _is_any(part: str) -> bool:
    return "*" in part.replace("[0-9]*", "")


def _states() -> Iterator[StateRule]:
    group = folders = ""
    for row in table("states.txt"):
        if row.startswith("["):
            group, _, folders = row[1:].partition("] ")
            continue
        name, *words = row.split()
        form = Form[words.pop(0)] if words[0].isupper() else None
        judged = words.pop(0)
        few, _, times = (words.pop(0) if judged == "count" else "0").partition("*")
        marks = {words.pop(0) for one in ("info", "now") if words[:1] == [one]}
        for glob in _each(name):
            yield StateRule(
                group=group,
                folders=folders,
                glob=glob,
                form=form,
                judged=judged,
                few=int(few),
                times=float(times or 20),
                is_info="info" in marks,
                is_recorded="now" not in marks and judged not in ("count", "use"),
                topic=" ".join(words),
            )


STATES = tuple(_states())


@cache
def state_rule(group: str, name: str) -> StateRule:
    """The first row of a group that fits a state's name."""
    fitting = (row for row in STATES if row.group == group and row.pattern.fullmatch(name))
    anything = StateRule(
        group=group,
        folders="",
        glob=name,
        form=None,
        judged="unknown",
        is_recorded=False,
    )
    return next(fitting, anything)


def differs(value: Any, usual: Any) -> bool:
    return True


_Key = TypeVar("_Key", bound=Hashable)


def judged_states(
    group: str, stated: Mapping[_Key, Mapping[str, str]]
) -> Iterator[tuple[StateRule, str, dict[_Key, str]]]:
    """Each state of like parts, its rule, and what of it is compared: counts that are no cause for
    worry are one text."""
    given = {key for key, states in stated.items() if states}
    had = {k: {of[0] for of in map(_OF_A_STATE.match, s) if of} for k, s in stated.items()}
    for name in dict.fromkeys(name for states in stated.values() for name in states):
        rule = state_rule(group, name)
        found = {key: states[name] for key, states in stated.items() if name in states}
        if rule.judged in ("there", "unknown", "none"):
            of = _OF_A_STATE.match(name)
            alike = {key for key in given if of and of[0] in had[key]}
            found = dict.fromkeys(alike if rule.judged == "unknown" else given, "none") | found
        elif rule.judged == "count":
            counts = {key: first_number(text) for key, text in found.items()}
            usual = median_low(counts.values()) if len(counts) > 1 else 0
            least = max(rule.few, rule.times * usual)
            few = f"about {usual:g}" if usual >= rule.few else f"fewer than {rule.few}"
            found = {key: found[key] if count >= least else few for key, count in counts.items()}
        if rule.judged not in ("use", "kept"):
            yield rule, name, found


_OF_A_STATE = re.compile(r"[^ /]+[ /]")
"""What has nothing of a register or folder lacks that, and not each state in it."""

WORSE: Mapping[str, Callable[[Any, Any], bool]] = {
    **dict.fromkeys(("other", "there", "unknown"), differs),
    "none": lambda value, usual: usual in ("0", "none"),
    "less": lambda value, usual: first_number(value) < first_number(usual),
    "count": lambda value, usual: value[:1].isdecimal(),
}


LEAST_ALIKE = 3
"""Of two that differ neither is known to be right."""


def is_odd_one(odd: int, usual: int) -> bool:
    """Of what no table names, whether so few differ from so many that it is no choice."""
    return usual >= LEAST_ALIKE * odd or (odd == 1 and usual >= LEAST_ALIKE - 1)


def usual_of(
    values: Sequence[Any], worse: Callable[[Any, Any], bool], *, may_tie: bool
) -> tuple[Any, int, bool] | None:
    """What most of some values are, how many, and whether it is more than half of three or more;
    None where they do not differ, or none is known to be right."""
    counts = Counter(values)
    if len(counts) < 2:
        return None
    usual, count = counts.most_common(1)[0]
    is_majority = len(values) >= LEAST_ALIKE and 2 * count > len(values)
    if is_majority:
        return usual, count, True
    # As many have one as another: the better one could be had by all.
    best = [v for v in counts if not any(worse(v, other) for other in counts if other != v)]
    return (best[0], counts[best[0]], False) if may_tie and len(best) == 1 else None


_COMPARED = (
    PathRule(f"{one.folders}/{one.glob}", Kind.FILE, one.form, "compared with like parts")
    for one in STATES
    if one.form is not None
)
PATHS = tuple({(one.kind, one.glob): one for one in (*_COMPARED, *_paths())}.values())


class KernelLine(NamedTuple):
    """What a line of the kernel's log says of failed hardware. text: without its time."""

    least: int
    severity: str
    about: str
    at: str
    what: str
    text: str


def _kernel_lines() -> Iterator[tuple[int, str, str, "re.Pattern[str]"]]:
    for row in table("kernel_lines.txt"):
        least, severity, about, pattern = row.split(" ", 3)
        yield int(least), severity, about.replace(".", " "), re.compile(pattern, re.ASCII)


_KERNEL_LINES = cache(lambda: tuple(_kernel_lines()))
_TIME = re.compile(
    r"\A(?:<\d{1,3}>)?\[(?:[A-Z][a-z]{2} ){0,2}[ 0-9:.]{1,24}\] ?(?:\[[ CT0-9]{1,12}\] )?"
)


def boot_lines(log: str) -> list[str]:
    """The time and first words of the line that a boot begins with, where the kernel's log has it:
    then it is whole.

    >>> boot_lines("[ 0.0] Linux version 6.12.0 (user@builder)\\n[ 9.1] usb 1-1: new device")
    ['[ 0.0] Linux version']
    """
    found = [(line, _TIME.sub("", line, count=1)) for line in log.splitlines()]
    starts = [(line, text) for line, text in found if text.startswith(_BOOT)]
    return [line.removesuffix(text) + _BOOT for line, text in starts]


_BOOT = "Linux version"


def kernel_line(line: str) -> KernelLine | None:
    """None of a line of no row of kernel_lines.txt.

    >>> kernel_line("[ 9.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off")[:5]
    (1, 'critical', 'GPU', '0000:3b:00.0', '79')
    """
    text = _TIME.sub("", line, count=1)[:400].rstrip()
    for least, severity, about, pattern in _KERNEL_LINES():
        if (said := pattern.match(text)) is not None:
            at = said["at"].lower()
            at = f"{at}.0" if ":" in at and "." not in at else at
            at = f"0000:{at}" if at.count(":") == 1 else at
            return KernelLine(least, severity, about, at, said["what"], text)
    return None


def _commands() -> Iterator[ToolCommand]:
    blocks = "\n".join(table("commands.txt")).replace("\n  ", "\t").splitlines()
    for head, *rows in (block.split("\t") for block in blocks):
        named, _, why = head.partition(" | ")
        name, timeout = named.split()
        wrapped, _, each = rows[-1].removeprefix("each ").partition(": ")
        spellings = tuple(tuple(row.split()) for row in rows if not row.startswith("each "))
        wrapped = wrapped if each else ""
        yield ToolCommand(name, spellings, why, int(timeout), tuple(each.split()), wrapped)


COMMANDS = tuple(_commands())
COMMAND_OF_NAME = {command.name: command for command in COMMANDS}

IDENTITY_PATHS = (
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/domainname",
    "/etc/hostname",
    "/etc/machine-id",
)
"""Read so that their words can be found and redacted elsewhere. Never stored."""

SERIAL_PATHS = tuple(
    f"/sys/devices/virtual/dmi/id/{name}"
    for name in ("product_serial", "board_serial", "chassis_serial", "chassis_asset_tag")
)
"""As IDENTITY_PATHS: each is one text, that only root may read."""

IDENTITY_COMMANDS = (ToolCommand("user", (("id", "-un"),), "whose name to redact", 10),)
"""As IDENTITY_PATHS."""
