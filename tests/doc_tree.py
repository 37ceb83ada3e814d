"""The pages of docs/ with those that are made from the source: findings and records.

`python -m tests.doc_tree FOLDER` writes them; `make docs` and `make deb` build from there.
"""

import re
import shutil
import sys
from functools import cache
from pathlib import Path

from homenode.findings import page

ROOT = Path(__file__).resolve().parents[1]
_ROW = re.compile(r"^\| \[([^]]+)\]\(([a-z]+)\.md\) \| (.+) \|$", re.MULTILINE)


@cache
def made_pages() -> dict[str, str]:
    """Texts by their paths in the checkout."""
    from tests.record_page import page as record_page  # which reads pages

    index = (ROOT / "docs/findings/README.md").read_text(encoding="utf-8")
    return {
        f"docs/findings/{name}.md": _findings(f"# {title}\n\n{about}.\n", name)
        for title, name, about in _ROW.findall(index)
    } | {"docs/records.md": record_page()}


def _findings(head: str, name: str) -> str:
    """A page of findings: those that mean the same have one section."""
    sections = [head]
    for first, texts in page(name).items():
        if first not in texts.also:
            sections.append(texts.markdown(f"## {', '.join((first, *texts.also))}"))
    return "\n".join(sections)


def main() -> int:
    folder = Path(sys.argv[1])
    shutil.copytree(ROOT / "docs", folder / "docs", dirs_exist_ok=True)
    for path, text in made_pages().items():
        (folder / path).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
