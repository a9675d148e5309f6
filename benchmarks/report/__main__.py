"""`python -m benchmarks.report`: see `pages`."""

from .pages import main

if __name__ == "__main__":
    raise SystemExit(main())
