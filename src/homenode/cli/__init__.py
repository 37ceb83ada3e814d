"""The command line: arguments, printing and exit codes only."""
