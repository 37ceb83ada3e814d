"""README's pictures are what homenode draws today."""

from pathlib import Path

from tests.doc_pages import ROOT
from tests.doc_pictures import IMAGES, pictures


def test_the_pictures_of_readme_are_made_by_homenode_as_it_is(tmp_path: Path) -> None:
    made = pictures(tmp_path)
    stored = {one.name: one.read_text(encoding="utf-8") for one in IMAGES.iterdir()}
    stale = {name for name in made.keys() | stored.keys() if made.get(name) != stored.get(name)}
    assert not stale, "python -m tests.doc_pictures DIR writes them"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"docs/images/{name}" in readme for name in made)
