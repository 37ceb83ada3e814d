"""Runs inside a virtual host: captures it, discovers the capture, and plans a VM on it."""

from tests.lab.found import say_what_is_found
from tests.lab.inside import run_and_report

run_and_report(say_what_is_found)
