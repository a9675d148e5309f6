"""What sparse attention is compared with: a dense ring, any number of ranks, and a dense row."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks.harness.records import ROOT
from benchmarks.ring import dense as dense_ring
from benchmarks.ring import links
from benchmarks.ring.links import Slow
from benchmarks.ring.rows import Row as RingRow
from benchmarks.ring.rows import main, parse, tell
from qla_kernels.sparse_ring import ZigZagLayout
from qla_kernels.sparse_ring.groups import Pending, RankRing
from tests.limits import HANG
from tests.mail import Mail


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_number_of_ranks_is_one_call(world):
    layout, kernel = ZigZagLayout(world), dense_ring.kernel_of("definition")
    q, k, v, do = (torch.randn(1, 256 * world, h, 8) for h in (2, 1, 1, 2))
    boxes: dict[object, Queue] = {}

    def one(rank: int) -> list[Tensor]:
        ring = Mail(boxes, list(range(world)), rank)
        mine = [layout.shard(x, 1, rank) for x in (q, k, v)]
        o, lse = dense_ring.forward(kernel, ring, *mine)
        return [o, *dense_ring.backward(kernel, ring, layout.shard(do, 1, rank), (*mine, o, lse))]

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(one, range(world)))
    o, lse = kernel.forward(q, k, v, True)
    want = [o, *kernel.backward(do, (q, k, v, o, lse), True)]
    for rank, got in enumerate(found):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, layout.shard(b, 1, rank), atol=2e-5, rtol=0)


def test_what_is_asked_for():
    options = parse(["--tokens", "65536,131072", "--heads", "8x32"])
    assert options.tokens == [65536, 131072]
    assert options.heads == (8, 32)


def test_two_processes_time_every_layout_and_schedule(tmp_path):
    """Over gloo. Every way is compared with one device before it is timed."""
    out = tmp_path / "rows.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "benchmarks.ring", "--device", "cpu"),
            *("--tokens", "512", "--heads", "1x2"),
            *("--head-dim", "16", "--density", "0.5", "--dense", "none", "--samples", "1"),
            *("--queued", "1", "--slow", "1", "--out", str(out)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=HANG,
        stdout=subprocess.PIPE,
        text=True,
    )
    header, first, *_ = done.stdout.splitlines()
    assert header.index("forward +") + len("forward") == first.index(" +", first.index("device"))
    assert "0.5k x1  sparse, one device" in first
    rows = {row["what"]: row for row in json.loads(out.read_text())}
    for layout in ("striped", "striped by 64", "zigzag", "contiguous"):
        for schedule in ("allgather", "ring"):
            row = rows[f"{layout}, {schedule}"]
            assert row["forward_ms"] > 0
            assert row["backward_ms"] > 0
            assert row["makespan"] >= 1
            assert row["compute_ms"] > 0
    assert "striped, double ring" in rows
    assert "striped, allgather, own chunk first" in rows
    assert "striped, allgather, kept" in rows
    assert "striped, ring, emulated 1 GB/s" in rows


def test_what_is_killed_leaves_its_rows(tmp_path, capsys):
    """The file was written after the last row alone."""
    out = tmp_path / "rows.json"

    def rows():
        yield RingRow("first", 1024, 1, 1.0, 2.0, 3.0)
        assert [row["what"] for row in json.loads(out.read_text())] == ["first"]
        yield RingRow("second", 1024, 2, 1.0, 2.0, 3.0, compute_ms=2.5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tell(rows(), out)
    assert [row["what"] for row in json.loads(out.read_text())] == ["first", "second"]
    assert capsys.readouterr().out.splitlines()[-1].endswith("compute 2.50")


def test_only_what_crosses_nodes_is_late(monkeypatch):
    """Of four ranks in nodes of two, rank 2 is the first of a node; 5 ms are 5000 bytes."""
    monkeypatch.setattr(RankRing, "swap", lambda self, swaps, tag: Pending([], []))
    monkeypatch.setattr(RankRing, "gather", lambda self, *x: Pending([], x))
    monkeypatch.setattr(RankRing, "sum", lambda self, x: Pending([], [x[0]]))
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=slept.append)
    monkeypatch.setattr(links, "time", clock)
    x = torch.zeros(5000, dtype=torch.int8)
    for rank, transfer, milliseconds in (
        (2, lambda ring: ring.shift([x], [x], 0), 5),
        (3, lambda ring: ring.shift([x], [x], 0), 0),
        (3, lambda ring: ring.gather(x), 10),
        (3, lambda ring: ring.sum(x.expand(4, 5000)), 10),
    ):
        slept.clear()
        transfer(Slow(None, rank, 4, node=2, rate=1e6)).wait()
        assert sum(slept) == pytest.approx(milliseconds / 1e3)


def test_heads_as_everywhere_and_a_start_by_hand(monkeypatch, capsys):
    assert parse(["--heads", "2/16"]).heads == parse(["--heads", "2x16"]).heads == (2, 16)
    with pytest.raises(SystemExit):
        parse(["--heads", "2"])
    assert "need key / query heads, such as 2/16" in capsys.readouterr().err
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match=r"need torchrun --nproc-per-node N -m benchmarks\.ring"):
        main(["--device", "cpu"])
