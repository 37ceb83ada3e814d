"""python -m homenode: the command line."""

from homenode.cli.main import main

if __name__ == "__main__":
    main()
