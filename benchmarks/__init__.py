"""Benchmarks: `python -m benchmarks.sm90` measures, `python -m benchmarks.show` prints records.

Reading order: `gdn.workloads` (what is run), `gdn.problem` (on which tensors, and what is right),
`harness.adapters` and `gdn.rivals` (by whom), `harness.timing`, `harness.worker` and
`harness.watchdog` (row after row, whatever goes wrong), then `harness.records`, `tables` and
`show`. The other families follow that order; `serving` is the rule as inference engines call it.
"""
