"""homenode why: the likeliest cause of what a paste shows. [I/O]"""

from pathlib import Path

from homenode.cli.arguments.check import WhyArguments
from homenode.cli.terminal import console, print_json
from homenode.errors import FINDINGS, InputError, UsageError
from homenode.formats import encode
from homenode.input_files import read_input
from homenode.machine.topology import Host
from homenode.show.why_text import why_text
from homenode.vm.sources import is_host_alone, load_host
from homenode.why.answer import answer

_TEXT = bytes([9, 10, 13, 27, *range(32, 127), *range(128, 256)])
_OF_A_VM = "virsh dumpxml VM > vm.xml; homenode why vm.xml error.log"


def why(asked: WhyArguments) -> None:
    """Print the answer; exit 1 where a cause was found."""
    if not asked.files:
        raise UsageError(
            "expected what you would post: files, or - for a paste on standard input",
            hint=_OF_A_VM,
        )
    texts: list[tuple[str, str]] = []
    hosts: list[Host] = []
    for name in asked.files:
        if name != "-" and is_host_alone(name):
            hosts.append(load_host(name))
            continue
        content = read_input(name, "a paste, a file or a log", hint=_OF_A_VM)
        source = "paste" if name == "-" else Path(name).name
        text = _text(content)
        if not text.strip() or _is_binary(content):
            found = "binary data" if text.strip() else "nothing"
            raise InputError(f"{name}: expected text as it is posted, found {found}")
        texts.append((_distinct(source, texts), text))
    if asked.host is not None:
        hosts.insert(0, load_host(asked.host))
    said = answer(texts, hosts)
    if asked.json:
        print_json(encode("why", said))
    else:
        console().print(why_text(said))
    if any(cause.finding.is_bad for cause in said.causes):
        raise SystemExit(FINDINGS)


def _text(content: bytes) -> str:
    """The text of a paste, whatever its line ends; of UTF-16 too, which Windows' programs write."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-16", "replace").replace("\r\n", "\n")
    text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    return text.replace("\r\n", "\n").replace("\0", "\ufffd")


def _is_binary(content: bytes) -> bool:
    """More of it are control letters than of a log with the zeros of a crash."""
    text = content[:2] not in (b"\xff\xfe", b"\xfe\xff")
    return text and 20 * len(content.translate(None, _TEXT)) > len(content)


def _distinct(source: str, texts: list[tuple[str, str]]) -> str:
    names = {name for name, _ in texts}
    return source if source not in names else f"{source} ({len(texts) + 1})"
