"""Decide: from runs to comparisons, caveats and recommendations."""
