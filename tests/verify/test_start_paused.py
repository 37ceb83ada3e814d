"""The files that a paused start makes or empties."""

import pytest

from homenode.check.verify.start import made_files
from homenode.vm.domain.document import parse_document

DOMAIN = """<domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>{}<devices>{}</devices>
<qemu:commandline>{}</qemu:commandline></domain>"""


def arguments(*words: str) -> str:
    return "".join(f"<qemu:arg value='{word}'/>" for word in words)


@pytest.mark.parametrize(
    ("os", "devices", "more", "files"),
    [
        ("<os><nvram>/n</nvram></os>", "", "", [("/n", False)]),
        ("<os><nvram type='file'><source file='/n'/></nvram></os>", "", "", [("/n", False)]),
        ("<os><nvram type='network'/></os>", "", "", []),
        ("", "<serial type='file'><source path='/s'/></serial>", "", [("/s", True)]),
        ("", "<serial type='file'><source path='/s' append='on'/></serial>", "", [("/s", False)]),
        ("", "<serial type='dev'><source path='/dev/ttyS0'/></serial>", "", []),
        ("", "<serial type='pty'><log file='/l' append='on'/></serial>", "", [("/l", False)]),
        ("", "<graphics><listen type='socket' socket='/g'/></graphics>", "", [("/g", True)]),
        ("", "<audio type='file' path='/a'/>", "", [("/a", True)]),
        ("", "", arguments("-pidfile", "/p"), [("/p", True)]),
        ("", "", arguments("-chardev", "file,id=c,path=/c,append=on"), [("/c", False)]),
        ("", "", arguments("-serial", "file:/f"), [("/f", True)]),
        ("", "", arguments("-gdb", "tcp::1234"), []),
    ],
)
def test_files_that_a_start_makes_are_those_that_the_document_names(
    os: str, devices: str, more: str, files: list[tuple[str, bool]]
) -> None:
    document = parse_document(DOMAIN.format(os, devices, more).encode(), "vm.xml")
    assert [(file.path, file.is_emptied) for file in made_files(document)] == files
