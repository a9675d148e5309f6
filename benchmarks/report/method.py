"""How times are taken, in words."""

METHOD = """\
- **Right first.** A result is compared with fp64 or fp32 before it is timed, and a wrong one has no
  time. [docs/records](docs/records/README.md#how-it-is-measured) says against what.
- **In turn.** Implementations alternate in bursts of 20 ms, with the GPU idle in between, because a
  GPU under sustained load lowers its clock. Times are medians.
- **Cold inputs.** Sets of inputs rotate, so that no call finds its inputs in the L2 cache; the
  smallest batches of serving are left there, for everyone.
- **Same work.** Layouts and gates that a library wants otherwise are converted outside the time.
  Versions of all rivals: [versions](docs/versions.md).
- **Eager calls** include Python and launches. A sample is a call among up to ten in a row.
- **Your own**: `bash scripts/setup_env.sh --rivals` installs rivals into `.venv` (1.3 GB), and
  `.venv/bin/python scripts/engine_interfaces.py` the sources of vLLM and SGLang. `.venv/bin/python
  -m qla_kernels.build --out FOLDER` makes kernels, 20 minutes on two cores; with
  `QLA_PREBUILT=FOLDER` they are launched as published eager times have it. Then, on a Hopper GPU,
  `.venv/bin/python -m benchmarks.sm90 gdn --heads 16/32 --lengths 4096x2` for a shape of yours
  (`--gates model --head-dim 96/192` for other gates and sizes); results lie in `--out`. Rows with
  names are made by `gdn --quick --direction fwd,bwd,both`, `gdn --set sizes`, `gdn --set decode`,
  `gdn --set serving --quick`, `dualkv --quick --set long,short`, `sparse_ring --quick` and `hybrid
  --quick`; `--save` appends them to `benchmarks/results`, and `python -m benchmarks.report` writes
  the pages. Each record's command is [beside it](docs/records/README.md). Two versions of ours:
  `git worktree add ../before COMMIT`, then `.venv/bin/python -m benchmarks.revisions ../before
  gdn:anchors`. Ranks of one sequence: `torchrun --nproc-per-node 2 scripts/gdn_ranks.py`
  ([times](docs/notes/gdn-segments.md#9-ranks)); rings: `torchrun --nproc-per-node N -m
  benchmarks.ring`."""

COMPILED = """\
So the host takes longer for our eager calls than with a wheel with kernels; to time these, run
`python -m qla_kernels.build --out FOLDER`, and set QLA_PREBUILT=FOLDER."""
