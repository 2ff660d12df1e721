"""`python -m nb_assertdoc` is the command `nb-assertdoc`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
