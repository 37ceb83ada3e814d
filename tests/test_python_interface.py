"""The Python interface: its page, its names, and that it costs nothing until it is used."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

import homenode
from homenode import api

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "python.md"


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
    assert set(homenode.__all__) <= named
    assert homenode.__all__ == api.__all__
    for name in homenode.__all__:
        assert getattr(homenode, name) is not None


def test_a_name_that_is_not_of_the_interface_is_refused() -> None:
    with pytest.raises(AttributeError, match="tunes"):
        homenode.tunes  # noqa: B018


def test_importing_loads_nothing_and_plan_stays_callable() -> None:
    code = (
        "import sys, homenode; assert 'homenode.api' not in sys.modules\n"
        "import homenode.plan.options, homenode.verify.target_file\n"
        "from homenode import plan, verify\n"
        "assert callable(plan) and callable(verify)\n"
        "print(plan('demo/gpu-vm.xml', 'hgx-h100').vcpus)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_a_file_that_is_not_there_is_an_error_with_its_name() -> None:
    with pytest.raises(homenode.HomenodeError, match=r"none\.xml"):
        homenode.plan("none.xml", "hgx-h100")
