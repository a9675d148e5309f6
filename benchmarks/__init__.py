"""Benchmarks: `python -m benchmarks.sm90`.

Reading order: `gdn.workloads` (what is run), `gdn.inputs` (on which tensors), `harness.adapters`
and `gdn.rivals` (by whom), `harness.truth` (what is right), `harness.floor` (what no kernel can
beat), `harness.timing` (how it is timed), `harness.worker` and `harness.watchdog` (row after row,
whatever goes wrong), then `harness.records` and `report`. Attention and rings follow that order,
and so does `serving`: the gated delta rule as inference engines call it.
"""
