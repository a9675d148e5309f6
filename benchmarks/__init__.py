"""Benchmarks: `python -m benchmarks.sm90`.

Reading order: `workloads` (what is run), `inputs` (on which tensors), `baselines` (by whom),
`truth` (what is right), `floor` (what no kernel can beat), `timing` (how it is timed), `worker` and
`harness` (row after row, whatever goes wrong), then `records`, `tables`, `figures`, `report`.
"""
