"""Samples: the results in the output of each tool and program."""
