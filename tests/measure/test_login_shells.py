"""A script reaches sh as it is, whichever login shell reads the command line first."""

import shutil
import subprocess

import pytest

from homenode.measure.access.remote import run_script, sh_line

SHELLS = ("sh", "bash", "dash", "zsh", "fish", "tcsh")
WORDS = (
    "a b",
    "it's",
    '"x"',
    "$HOME `id` $(id)",
    "a\\b \\\\ \\' \\n %s %%",
    "hey! !! !$",
    "two\nlines",
    "é",
)


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_given_on_unchanged(shell: str, word: str) -> None:
    line = sh_line(run_script(("printf", "%s|", word, "last"), 10, "MARK"))
    done = subprocess.run([shell, "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout == f"{word}|last|", done.stderr
    assert done.stderr.endswith("\nMARK 0\n")


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_standard_input_stays_the_scripts(shell: str) -> None:
    line = sh_line("read -r a; printf '%s!\\n' \"$a\"")
    done = subprocess.run([shell, "-c", line], input="data\n", capture_output=True, text=True)
    assert done.stdout == "data!\n", done.stderr
