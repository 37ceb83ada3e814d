"""Every finding of the Slurm commands has a page with the same sections, and no more pages are."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs/findings/slurm"
SOURCES = ("audit", "check_gres", "check_slurm", "ranks")
_ID = re.compile(r"(job|gres|slurm|cgroup|config|bind|gpu-order)-[a-z-]+")


def ids() -> set[str]:
    """Texts of these files that are ids of findings."""
    found = set()
    for name in SOURCES:
        tree = ast.parse((ROOT / f"src/homenode/slurm/{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if _ID.fullmatch(node.value) else set()
    return found


def test_every_finding_has_its_page_and_every_page_its_finding() -> None:
    pages = {path.stem for path in PAGES.glob("*.md")} - {"README"}
    assert pages == ids() and len(pages) > 25


def test_every_page_says_cause_cost_fix_source_and_both_machines() -> None:
    index = (PAGES / "README.md").read_text()
    for path in PAGES.glob("*.md"):
        if path.stem == "README":
            continue
        text = path.read_text()
        headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert headings == ["Cause", "Cost", "Fix", "Source", "Seen in"], path
        assert text.startswith(f"# {path.stem}\n") and f"]({path.name})" in index
        assert "* has it: " in text and "* nearly has it: " in text
