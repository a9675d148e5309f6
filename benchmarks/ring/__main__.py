"""`torchrun --nproc-per-node N -m benchmarks.ring`: see `rows`."""

from .rows import main

if __name__ == "__main__":
    main()
