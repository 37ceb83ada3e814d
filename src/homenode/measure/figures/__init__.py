"""Figures: samples from the output of each tool and program."""
