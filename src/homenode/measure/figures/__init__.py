"""Figures: what the output of each tool and program comes to, as samples."""
