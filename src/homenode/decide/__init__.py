"""Decide: from runs to comparisons, doubts and verdicts."""
