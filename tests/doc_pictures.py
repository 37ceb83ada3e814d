"""The pictures of README: made by homenode itself.

`python -m tests.doc_pictures` writes them; `make docs` does so before it makes the pages.
"""

import re
import sys
from pathlib import Path

from homenode.doc import Gallery
from homenode.show.report.answer import answer_section
from homenode.show.report.inputs import gather
from homenode.show.report.machine import build_machines
from homenode.show.svg_canvas import CHART, read_css
from tests.command_line import homenode
from tests.doc_pages import ROOT

IMAGES = ROOT / "docs" / "images"
_SIZE = re.compile(r'(?<= )(width|height)="([\d.]+)"')
_LARGER = 2


def pictures(directory: Path) -> dict[str, str]:
    """The text of each, by its file's name. directory: for what commands write."""
    return {
        "hgx-h100-pin-numa-pci.svg": _planned(directory / "planned.svg"),
        "layouts-change.svg": _published(),
    }


def _planned(path: Path) -> str:
    options = "--host hgx-h100 --layout pin-numa-pci --gpus 8".split()
    done = homenode("plan", ROOT / "demo" / "gpu-vm.xml", *options, "--svg", path, "-q", "--force")
    assert path.is_file(), done.stderr
    return path.read_text(encoding="utf-8")


def _published() -> str:
    """What each layout changes, of published figures, with its style sheet inside."""
    found = gather([str(ROOT / "demo" / "published")], ())
    machines = build_machines(found.runs, found.stored, found.hosts)
    (gallery,) = (
        one
        for one in answer_section(machines, ["x"] * len(machines)).parts
        if isinstance(one, Gallery)
    )
    head, _, rest = gallery.pictures[0].svg.partition(">")
    head = _SIZE.sub(lambda one: f'{one[1]}="{float(one[2]) * _LARGER:g}"', head)
    style = f"<style>{read_css(*CHART)}</style>"
    return f'{head} xmlns="http://www.w3.org/2000/svg">{style}{rest}\n'


def main() -> int:
    """Write those that are not as they should be."""
    for name, text in pictures(Path(sys.argv[1])).items():
        (IMAGES / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
