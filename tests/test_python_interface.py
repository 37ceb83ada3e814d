"""The Python interface: its page, its names, and that it costs nothing until it is used."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

from homenode import api

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "python.md"


def test_the_page_shows_what_python_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = PAGE.read_text(encoding="utf-8").replace("…", "...").replace("```", "")
    parsed = doctest.DocTestParser().get_doctest(text, {}, "python.md", str(PAGE), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(parsed)
    assert runner.summarize().failed == 0
    assert runner.tries > 10


def test_the_page_names_the_interface_and_nothing_else() -> None:
    named = set(re.findall(r"`([A-Za-z_]+)", PAGE.read_text(encoding="utf-8").partition("##")[0]))
    assert set(api.__all__) <= named
    for name in api.__all__:
        assert getattr(api, name) is not None


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys, homenode; print(*(name for name in sys.modules if 'homenode' in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "homenode.api" not in done.stdout.split()
    assert {name for name in done.stdout.split() if name.startswith("homenode.")} == set()


def test_a_file_that_is_not_there_is_an_error_with_its_name() -> None:
    with pytest.raises(api.HomenodeError, match=r"none\.xml"):
        api.plan("none.xml", "hgx-h100")
