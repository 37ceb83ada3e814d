"""Completion: what a shell may fill in, and the scripts that have it ask homenode. [I/O]

A script sets _HOMENODE_COMPLETE to complete_SHELL, COMP_WORDS to the words of the line, one a line,
and COMP_CWORD to the number of the one that is typed. What knows the values of an option takes what
was typed so far and gives candidates; those that begin like it are kept.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from homenode.cli.command import Command, Parameter
from homenode.cli.terminal import note, say, write_bytes, write_text
from homenode.errors import UsageError
from homenode.input_files import read_input
from homenode.opt import Arg, Flag

Candidates = list[tuple[str, str] | str]

SCRIPTS = {
    "bash": """_homenode_completion() {
    local IFS=$'\\n'
    COMPREPLY=($(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \\
        _HOMENODE_COMPLETE=complete_bash "$1"))
}
complete -o default -F _homenode_completion homenode
""",
    "zsh": """#compdef homenode
_homenode_completion() {
    local -a found
    found=("${(@f)$(COMP_WORDS="${(F)words}" COMP_CWORD=$((CURRENT - 1)) \\
        _HOMENODE_COMPLETE=complete_zsh homenode)}")
    [[ -n $found ]] && _describe homenode found || _files
}
compdef _homenode_completion homenode
""",
    "fish": """function __homenode_complete
    set -l typed (commandline -opc) (commandline -ct)
    set -lx COMP_WORDS (string join \\n -- $typed)
    set -lx COMP_CWORD (math (count $typed) - 1)
    _HOMENODE_COMPLETE=complete_fish homenode
end
complete --command homenode --arguments "(__homenode_complete)"
""",
}
"""What each shell reads once."""

_PLACES = {
    "bash": (".bash_completions/homenode.sh", ".bashrc", "source ~/.bash_completions/homenode.sh"),
    "zsh": (".zfunc/_homenode", ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
    "fish": (".config/fish/completions/homenode.fish", None, ""),
}
"""Below the home folder: where the script goes, and the file and line of the shell that read it."""

_VIRSH_S = 3.0
"""A daemon that does not answer must not keep a shell waiting."""


def shell_of(name: str | None) -> str:
    """The shell that is named, else the user's. Raises UsageError."""
    shell = name or Path(os.environ.get("SHELL", "")).name
    if shell not in SCRIPTS:
        raise UsageError(
            f"completion: expected one of {', '.join(SCRIPTS)}, found {shell or 'none'}",
            hint="homenode --show-completion bash",
        )
    return shell


def script(shell: str) -> str:
    """What the shell reads."""
    return SCRIPTS[shell].rstrip()


def install(shell: str) -> None:
    """Write the script where the user's shell reads it."""
    place, start, line = _PLACES[shell]
    path = Path.home() / place
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, SCRIPTS[shell])
    if start is not None:
        read_at_start = Path.home() / start
        said = b""
        if read_at_start.exists():
            said = read_input(read_at_start, "what the shell reads at its start")
        if line.encode() not in said:
            write_bytes(read_at_start, said.rstrip() + b"\n"[: len(said)] + line.encode() + b"\n")
    note(f"wrote {path}; it counts from the next start of {shell} on")


def answer(asked: str, program: Command) -> None:
    """Print a script, or the candidates for the word that is typed."""
    task, _, shell = asked.partition("_")
    if task == "source" and shell in SCRIPTS:
        say(script(shell))
        return
    words = os.environ.get("COMP_WORDS", "").split("\n")
    number = os.environ.get("COMP_CWORD", "0")
    at = int(number) if number.isdecimal() else 0
    typed = words[at] if at < len(words) else ""
    for one in candidates(program, words[1:at], typed):
        name, about = (one, "") if isinstance(one, str) else one
        if shell == "fish":
            say(f"{name}\t{about}" if about else name)
        elif shell == "zsh":
            say(name.replace(":", "\\:") + (f":{about}" if about else ""))
        else:
            say(name)


def candidates(program: Command, before: Sequence[str], typed: str) -> Candidates:
    """What the typed word may become, after the words before it."""
    command, words = program, list(before)
    while words and words[0] in command.subcommands:
        command = command.subcommands[words.pop(0)]
    if words and not command.record:
        return []
    parameters = command.parameters
    waiting = [one for one in parameters if words and words[-1] in one.opt.names]
    if waiting and not isinstance(waiting[0].opt, Flag):
        return _of(waiting[0], typed)
    if typed.startswith("-"):
        names = [name for one in parameters for name in one.opt.names if name.startswith("--")]
        return [name for name in (*names, "--help") if name.startswith(typed)]
    below = [one.name for one in command.commands if not (one.hidden or words)]
    arguments = [one for one in parameters if isinstance(one.opt, Arg) and one.opt.complete]
    found: Candidates = [name for name in below if name.startswith(typed)]
    return found + [one for argument in arguments[:1] for one in _of(argument, typed)]


def _of(one: Parameter, typed: str) -> Candidates:
    """Values of an option or argument."""
    known: Candidates = list(one.choices)
    if one.opt.complete:
        known = _KNOWN[one.opt.complete](typed)
    return [two for two in known if (two if isinstance(two, str) else two[0]).startswith(typed)]


def layouts(incomplete: str) -> Candidates:
    """Layouts with what each does, and auto."""
    from homenode.vm.layout import AUTO_SUMMARY, SUMMARIES

    return [("auto", AUTO_SUMMARY), *SUMMARIES.items()]


def layout_lists(incomplete: str) -> Candidates:
    """The last of several layouts with commas between them."""
    from homenode.vm.layout import PRESETS

    return _after_comma(incomplete, PRESETS)


def test_lists(incomplete: str) -> Candidates:
    """The last of several groups of tests with commas between them."""
    from homenode.measure.model import Group

    return _after_comma(incomplete, (str(one) for one in Group if one is not Group.APP))


def host_sources(incomplete: str) -> Candidates:
    """Names of shipped hosts, and files."""
    from homenode.machine.description.shipped import shipped_hosts

    return [*shipped_hosts(), *_files(incomplete)]


def domain_names(incomplete: str) -> Candidates:
    """Domains of the system's libvirt; none where it does not answer."""
    from homenode.errors import ToolError
    from homenode.process import run

    argv = ("virsh", "-q", "-r", "-c", "qemu:///system", "list", "--all", "--name")
    try:
        listed = run(argv, _VIRSH_S).stdout_or_raise()
    except ToolError:
        return []
    return [line.strip() for line in listed.splitlines() if line.strip()]


def finding_ids(incomplete: str) -> Candidates:
    """Findings that have a page."""
    from homenode.catalogue import catalogue

    return sorted(catalogue())


def _after_comma(incomplete: str, known: Iterable[str]) -> Candidates:
    before, comma, _ = incomplete.rpartition(",")
    given = before.split(",")
    return [f"{before}{comma}{one}" for one in known if one not in given]


def _files(incomplete: str) -> Iterator[str]:
    """Paths that begin like this, as a shell names them."""
    folder, slash, name = incomplete.rpartition("/")
    try:
        for path in sorted(Path(folder or slash or ".").iterdir()):
            if path.name.startswith(name) and (name or not path.name.startswith(".")):
                yield f"{folder}{slash}{path.name}" + ("/" if path.is_dir() else "")
    except OSError:
        return


_KNOWN = {
    "layouts": layouts,
    "layout_lists": layout_lists,
    "test_lists": test_lists,
    "host_sources": host_sources,
    "domain_names": domain_names,
    "finding_ids": finding_ids,
}
"""By the name that an option gives as `complete`."""
