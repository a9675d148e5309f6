"""`python -m benchmarks.ring_ranks`: see `benchmarks.ring.ranks`."""

from .ring.ranks import main

if __name__ == "__main__":
    main()
