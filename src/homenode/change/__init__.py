"""Change: steps that change a host, each recorded before it runs, with its undo."""
