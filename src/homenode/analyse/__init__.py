"""Analyse: from runs to comparisons, doubts and verdicts."""
