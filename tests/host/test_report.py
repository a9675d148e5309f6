"""Records, tables, figures and generated pages say what was measured, and what was not."""

import dataclasses
import itertools
import json
import math
import re
from xml.etree import ElementTree

import pytest

from benchmarks.attention.workloads import DUALKV, SPARSE_RING
from benchmarks.gdn.workloads import GDN
from benchmarks.harness import records
from benchmarks.harness.own_shapes import DIRECTIONS
from benchmarks.harness.records import (
    DIED,
    FAILED,
    MEMORY,
    MISSING,
    OK,
    TIME_LIMIT,
    UNSUPPORTED,
    WRONG,
    Result,
)
from benchmarks.report import __main__ as program
from benchmarks.report import (
    faults,
    findings,
    headline,
    names,
    pages,
    pictures,
    select,
    slower,
    spread,
    style,
    tables,
)
from benchmarks.report.figures import charts, draw
from benchmarks.report.svg import Bar, Chart, Group
from benchmarks.sm90 import SETS
from tests.host.made_up_runs import KERNELS, anchor_run, run_of, shared_run

current, other = KERNELS, {"gdn.gate-fp32": "something else"}


# --- records


def test_records_come_back_as_they_were_appended(tmp_path):
    first, second = anchor_run(failures=True), run_of(GDN["kernels"], id="gdn-2", date="2026-02-03")
    for run in (second, first):
        path = records.append(run, tmp_path)
    assert path.name == "2026-01-02-nvidia-h200.jsonl"
    assert records.load(tmp_path) == [records.as_called(first), second]


def test_eager_times_of_a_choice_undone_count_since_calls_undo_it():
    """Until then they were of the default: "uncut" was faster in eager calls than in graphs."""
    older = anchor_run()
    newer = dataclasses.replace(older, date="2026-12-01T00:00:00+00:00")
    assert records.as_called(newer) == newer
    timed = [x for row in older.rows for x in row.results if x.time_ms(True)]
    known = [x for row in records.as_called(older).rows for x in row.results if x.time_ms(True)]
    assert known == [x for x in timed if x.implementation not in records.VARIANTS] != timed


def test_one_sequence_of_an_older_record_is_named_as_today(tmp_path):
    run = anchor_run()
    today = [w.name for w in GDN["anchors"]]
    assert "gdn-fwd-2x8-32768x1-published-h0" in today
    older = [
        dataclasses.replace(
            row,
            name=re.sub(r"-(\d+)x1-", r"-1x\1-", row.name),
            layout=re.sub(r"^(\d+)x1$", r"1x\1", row.layout),
        )
        for row in run.rows
    ]
    assert older[0].layout == "1x32768"
    records.append(dataclasses.replace(run, rows=tuple(older)), tmp_path)
    assert records.load(tmp_path) == [records.as_called(run)]


def test_a_record_file_is_only_appended_to_and_other_lines_are_passed_over(tmp_path):
    path = records.append(anchor_run(), tmp_path)
    before = path.read_text()
    with path.open("a") as file:
        file.write(json.dumps({"entry": "device_check", "passed": 3}) + "\n")
    records.append(anchor_run(id="again"), tmp_path)
    assert path.read_text().startswith(before)
    assert [run.id for run in records.load(tmp_path)] == [anchor_run().id, "again"]


def test_every_line_is_strict_json(tmp_path):
    row = anchor_run().rows[0]
    broken = dataclasses.replace(
        row, results=(Result("ours", "wrong", "ht is off by nan", errors={"ht": None}),)
    )
    path = records.append(run_of([], rows=(broken,)), tmp_path)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_committed_records_can_be_read():
    for run in records.load():
        assert run.rows


# --- tables


def test_the_table_marks_slower_rows_and_ends_in_the_geometric_mean():
    run = anchor_run()
    text = tables.summary(run)
    graph, eager = (
        [tables.ratio(row, tables.our_names(run), way) for row in run.rows if row.kind == "fwd"]
        for way in (False, True)
    )
    assert text.count(tables.SLOWER) == sum(r < 1 for r in (*graph, *eager))
    means = [f"{math.prod(ratios) ** (1 / len(ratios)):.2f}" for ratios in (graph, eager)]
    assert means[0] != means[1]
    assert f"geometric mean of {len(graph)} / {len(graph)}" in text
    assert f"| {' / '.join(means)} |" in " ".join(text.split())


def test_graph_and_eager_times_stand_side_by_side_and_what_is_absent_is_a_dash():
    run = run_of(GDN["anchors"][:1])
    (row,) = run.rows
    header, _, line = tables.summary(run).splitlines()[2:5]
    cells = dict(zip(*([x.strip() for x in t.split("|")] for t in (header, line)), strict=True))
    ours, rival = row.result("ours"), row.result("flashinfer")
    assert rival.p50_ms < ours.p50_ms
    assert rival.eager_ms < ours.eager_ms
    times = [tables.number(x) for x in (rival.p50_ms, rival.eager_ms)]
    assert cells["FlashInfer"] == "**{}** / **{}**".format(*times)
    ratios = rival.p50_ms / ours.p50_ms, rival.eager_ms / ours.eager_ms
    assert cells["rival / ours"] == " / ".join(f"{r:.2f} ▼" for r in ratios)
    assert cells["first call s, ours / rival"] == "12.0 / 12.0"

    older = dataclasses.replace(ours, eager_ms=None, first_call_s=None)
    lone = dataclasses.replace(row, results=(older, rival))
    text = tables.summary(dataclasses.replace(run, rows=(lone,)))
    assert f"| {tables.number(ours.p50_ms)} / – |" in text.replace("  ", "")
    assert f"| {ratios[0]:.2f} ▼ / – |" in text.replace("  ", "")
    assert "| – / 12.0 |" in " ".join(text.split())


def test_the_ratio_is_of_the_best_rival_and_never_of_our_own_variants():
    row = anchor_run().rows[0]
    rivals = [r.p50_ms for r in row.results if not r.implementation.startswith("ours")]
    name, time = tables.best_rival(row, ("ours", "ours_train"))
    assert (name, time) == ("flashinfer", min(rivals))
    assert tables.ratio(row, ("ours", "ours_train")) == pytest.approx(time / row.time_ms("ours"))


def test_failures_stand_in_their_cells_and_their_reasons_below():
    text = tables.summary(anchor_run(failures=True))
    for word in ("wrong", "time limit", "out of memory", "failed"):
        assert f" {word} |" in text
    assert "- FLA, " in text
    assert "made up for row" in text


def test_without_ours_there_is_no_ratio_and_it_says_unsupported():
    text = tables.summary(anchor_run(with_ours=False))
    assert " unsupported |" in text
    assert "no CUDA kernel yet" in text
    assert "geometric mean" not in text


def test_missing_libraries_are_announced():
    run = anchor_run(missing={"fla": "ModuleNotFoundError: No module named 'fla'"})
    assert "- FLA is missing: ModuleNotFoundError" in tables.summary(run)
    assert "| FLA |" not in tables.summary(run)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0623, "0.0623"), (0.392, "0.392"), (1.534, "1.53"), (34.5, "34.5"), (1700.0, "1700"),
     (0.0, "0"), (None, "–")],
)  # fmt: skip
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert tables.number(value) == text


def test_details_have_every_measurement():
    run = anchor_run(failures=True)
    measured = sum(r.status == OK for row in run.rows for r in row.results)
    assert len(tables.details(run).splitlines()) == measured + 2
    result = Result(
        "ours", OK, p20_ms=1, p50_ms=2, p80_ms=3, eager_p20_ms=4, eager_ms=5, eager_p80_ms=6,
        host_additions=7.77,
    )  # fmt: skip
    row = dataclasses.replace(run.rows[0], results=(result,))
    (line,) = tables.details(dataclasses.replace(run, rows=(row,))).splitlines()[2:]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[3:10] == ["1.00", "2.00", "3.00", "4.00", "5.00", "6.00", "7.8"]
    assert cells[-4:-1] == ["–", "–", "–"]  # memory, first call, error


TIMES = {"ours": 1.0, "fwd fa4_shared": 1.45, "bwd fa4_shared": 1.1, "fa4": 3.0}


def test_shared_prompts_have_ratios_of_both_directions_and_of_their_sum():
    text = tables.summary(shared_run(DUALKV["short"], TIMES))
    lines = text[text.index("Forward, backward and their sum") :].splitlines()
    rows = [line.split("|") for line in lines[4:] if line.startswith("|")]
    cells = {c[1]: c[2:] for c in ([x.strip() for x in row] for row in rows)}
    assert cells["S1"][:6] == ["1.45", "1.10", "1.27", "3.00", "3.00", "3.00"]
    assert cells["S5"][:3] == ["1.45", "1.10", "1.27"]
    slower = shared_run(DUALKV["short"], {**TIMES, "bwd fa4_shared": 0.9})
    assert tables.summary(slower).count("0.90 ▼") >= len(DUALKV["short"]) // 2
    assert "required" not in text  # no target of ours is anybody's business
    one_way = shared_run([w for w in DUALKV["short"] if w.direction == "fwd"], TIMES)
    assert "their sum" not in tables.summary(one_way)


def test_heads_of_256_have_a_line_for_each_number_of_heads():
    text = tables.summary(shared_run(DUALKV["wide"], {**TIMES, "bwd fa4_shared": 0.9}))
    lines = text[text.index("Forward, backward and their sum") :].splitlines()
    cells = [[x.strip() for x in line.split("|")][1:-1] for line in lines[4:10]]
    assert {row[0] for row in cells} == {"2/16", "4/16"}
    assert {row[1] for row in cells} == {w.label for w in DUALKV["wide"]}
    assert all(row[2:4] == ["1.45", "0.90 ▼"] for row in cells)


def test_one_row_has_no_mean():
    assert "geometric mean" not in tables.summary(run_of(GDN["anchors"][:1]))


def test_calls_that_are_not_merged_are_shown_and_are_no_rival():
    rows = shared_run(DUALKV["short"], {**TIMES, "fa4_calls": 0.5}).rows
    assert tables.best_rival(rows[0], ("ours",)) == ("fa4_shared", 1.45)
    text = tables.summary(shared_run(DUALKV["short"], {**TIMES, "fa4_calls": 0.5}))
    assert "0.50 ▼" in text


def test_memory_and_useful_rates_stand_below_the_times_of_shared_prompts():
    text = tables.summary(shared_run(DUALKV["short"][:1], TIMES))
    assert "Forward; useful TFLOP/s, and peak MiB beyond the inputs" in text
    assert "| 2000, 3 |" in text  # 2 TFLOP in 1 ms
    assert "peak MiB" not in tables.summary(anchor_run())
    step = [dataclasses.replace(GDN["anchors"][-1], direction="both")]
    assert "peak MiB" in tables.summary(run_of(step))


# --- figures


def test_a_figure_for_each_direction_and_number_of_heads(tmp_path):
    written = draw(anchor_run(), tmp_path / "new")
    assert {path.name for path in written} == {
        *(f"gdn-fwd-{heads}.svg" for heads in ("2x8", "16x32", "16x64")),
        *(f"gdn-bwd-{heads}.svg" for heads in ("16x32", "4x8")),
    }
    assert all(path.read_text().startswith("<svg") for path in written)


def test_figures_are_the_same_each_time():
    run = run_of(GDN["anchors"][:7])
    texts = [chart.svg() for _ in range(2) for chart in charts(run).values()]
    assert texts[: len(texts) // 2] == texts[len(texts) // 2 :]


def test_a_figure_says_what_to_see_and_has_every_rival():
    run = anchor_run()
    chart = charts(run)["gdn-fwd-16x32"]
    rows = [row for row in run.rows if (row.kind, row.heads) == ("fwd", "16/32")]
    ratios = [tables.ratio(row, tables.our_names(run)) for row in rows]
    seen = f"the best rival takes {min(ratios):.2f} to {max(ratios):.2f} times as long as ours"
    assert chart.title == f"Gated delta net, forward, 16 key and 32 value heads: {seen}"
    assert chart.series == ("ours", "FlashQLA", "FlashInfer", "FLA")
    assert chart.groups[0].name == "1 sequence of 32768 tokens"
    first = chart.groups[0].bars
    assert first[0].value == 1
    mine, rival = (rows[0].time_ms(name) for name in ("ours", "fla"))
    assert first[3].value == pytest.approx(rival / mine)
    eager = tables.number(rows[0].time_ms("fla", eager=True))
    assert first[3].label == f"{rival / mine:.2f} x, {tables.number(rival)} ms (eager {eager})"


def test_a_figure_is_readable_at_the_width_of_a_page_and_on_a_dark_one():
    text = charts(anchor_run())["gdn-fwd-16x32"].svg()
    assert 'width="860"' in text
    sizes = [int(x) for x in re.findall(r"font(?:-size)?:(\d+)px", text)]
    assert min(sizes) >= 13
    assert "@media (prefers-color-scheme: dark)" in text
    assert 'fill="#fff' not in text  # no background
    tree = ElementTree.fromstring(text)
    ends = [float(x.get("x")) + float(x.get("width")) for x in tree.iter() if "rect" in x.tag]
    assert max(ends) <= 860 - 200  # room for labels
    (title, described) = (tree.find(f"{{*}}{name}").text for name in ("title", "desc"))
    assert described.startswith(title)
    assert "FlashQLA" in described


def test_special_signs_of_labels_do_not_break_a_figure():
    chart = Chart("a < b & c", 'a "b"', ("<ours>",), (Group("a & b", (Bar(0, 1.0, "<1 ms"),)),))
    ElementTree.fromstring(chart.svg())


def test_rows_without_ours_are_beside_the_fastest():
    chart = charts(anchor_run(with_ours=False))["gdn-fwd-2x8"]
    assert "ours" not in chart.series
    assert "times as long" not in chart.title
    assert all(min(bar.value for bar in group.bars) == 1 for group in chart.groups)


def test_different_gates_are_different_figures():
    found = charts(run_of([*GDN["forward"][:3], *GDN["published"][:3]]))
    assert set(found) == {"gdn-fwd-2x8-model-gates", "gdn-fwd-2x8-published-gates"}


def test_shared_prompts_are_beside_whole_sequences_and_a_step_is_both_directions():
    run = shared_run(DUALKV["long"], TIMES)
    step = charts(run)["dualkv-step-8x32"]
    assert step.title.endswith("whole sequences take 3.00 times as long as ours")
    assert step.series == (
        "ours", "flash-attn-4, 3 calls a group", "flash-attn-4, whole sequences",
    )  # fmt: skip
    assert step.groups[0].name == "A: 28 responses of 2048 to a prompt of 4096"
    assert [bar.value for bar in step.groups[0].bars] == pytest.approx([1, (1.45 + 1.1) / 2, 3])
    assert "dualkv-step-8x32" not in charts(shared_run(DUALKV["long"][:4], TIMES))


MASKED = {"ours": 2.0, "fa4": 30.0}


def masked_run():
    """A dense rival has no mask; ours has both."""
    rows = []
    for row in shared_run(SPARSE_RING["anchor"], MASKED).rows:
        kept = [r for r in row.results if r.implementation == "ours" or row.what == "dense"]
        rows.append(dataclasses.replace(row, results=tuple(kept)))
    return dataclasses.replace(shared_run(SPARSE_RING["anchor"], MASKED), rows=tuple(rows))


def test_a_mask_is_beside_all_pairs_and_the_ideal():
    chart = charts(masked_run())["sparse_ring-fwd-8x32"]
    assert chart.title.endswith("all pairs take 15.00 times as long as ours")
    assert chart.series[1:] == ("flash-attn-4, no mask", "ideal: that times the density")
    assert [bar.value for bar in chart.groups[0].bars] == [1, 15, 0.75]
    assert chart.groups[0].name == "128K tokens, 5 %, single diagonals"


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("8192x1", "1 sequence of 8192 tokens"),
        ("1x8192", "8192 sequences of 1 token"),
        ("1x4096+512", "1 response of 512 to a prompt of 4096"),
        ("24576+8192", "sequences of 24576 and 8192 tokens"),
        ("8192x4", "4 sequences of 8192 tokens"),
        ("32768 in 8", "8 ragged sequences, 32768 tokens"),
        ("64 of 1", "64 sequences of 1 token"),
        ("64 of 4", "64 sequences of 4 tokens"),
        ("C", "C: 16 responses of 2048 to a prompt of 32768"),
        ("S3", "S3: 4 prompts of 200, 8 responses of 106 to 497 to each"),
        ("4of16x4096+512", "16 responses of 512 to each of 4 prompts of 4096"),
        ("6144+2048/4", "sequences of 6144 and 2048 tokens, 4 times shorter"),
        ("28x32768+2048", "28 responses of 2048 to a prompt of 32768"),
        ("128k-5%-run4", "128K tokens, 5 %, diagonals in runs of 4"),
        ("128k-0.5%-run1", "128K tokens, 0.5 %, single diagonals"),
        ("128k-dense", "128K tokens, no mask"),
        ("something else", "something else"),
    ],
)
def test_shapes_are_named_in_words(layout, words):
    row = dataclasses.replace(anchor_run().rows[0], layout=layout)
    assert names.shape_of(row) == words


def test_figures_of_notes_follow_a_dark_page_too():
    svg = '<svg>\n <defs>\n  <style type="text/css"></style>\n </defs></svg>'
    once = style.on_dark_pages(svg)
    assert "prefers-color-scheme: dark" in once
    assert style.on_dark_pages(once) == once


# --- generated pages


def front(runs, digests):
    """All generated parts of the front page."""
    return "\n".join(headline.front_page(runs, digests).values())


def raw(runs, digests, family="gdn"):
    return pages.records_page(runs, family, digests)


def ends(of_all):
    """Least and greatest, as the first table has them."""
    few, most = (f"{ratio:.1f}" for ratio in (of_all.worst, of_all.best))
    return f"**{few} to {most} x**" if few != most else f"**{few} x**"


def cells_of(text, start):
    """Of the first line of a table that starts with a text."""
    line = next(x for x in text.splitlines() if x.startswith(f"| {start}"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_without_a_record_the_pages_say_so():
    for text in (front([], current), findings.page([], current)):
        assert "No record on an SM90 GPU yet" in text
    assert "not measured yet" in front([], current)
    for family in SETS:
        assert f"python -m benchmarks.sm90 {family} --quick --save" in raw([], current, family)


def test_a_line_has_times_of_a_typical_shape_and_ratios_of_all():
    """Calls without a graph are slower, and in another order."""
    run = anchor_run()
    cells = cells_of(
        findings.page([run], current), "Gated delta net, forward; 16/32 heads; 7 shapes"
    )
    rows = [row for row in run.rows if (row.kind, row.heads) == ("fwd", "16/32")]
    ours = tables.our_names(run)
    typical = sorted(rows, key=lambda row: tables.ratio(row, ours))[3]
    assert cells[1] == names.shape_of(typical)
    for eager, said in ((False, cells[3:5]), (True, cells[5:7])):
        ratios = [tables.ratio(row, ours, eager) for row in rows]
        times = typical.time_ms("ours", eager), tables.best_rival(typical, ours, eager)[1]
        assert said[0] == " / ".join(map(tables.number, times))
        mean = math.prod(ratios) ** (1 / 7)
        assert said[1] == f"{mean:.2f} x ({tables.marked(min(ratios))})"
    assert cells[2] == run.labels[tables.best_rival(typical, ours)[0]]
    assert "CUDA graph" not in tables.summary(anchor_run(device_kind="cpu"))


def test_a_backward_that_computed_more_than_in_a_step_has_no_graph_time():
    """FlashQLA's, without the segments that its forward keeps; eager calls had them."""
    old, new = (run_of(GDN["anchors"], date=date) for date in ("2026-01-02", "2026-12-01"))
    assert faults.without(new) is new
    for run, dashes in ((old, True), (new, False)):
        text = findings.page([faults.without(run)], current)
        cells = cells_of(text, "Gated delta net, backward; 16/32")
        assert (cells[3] == cells[4] == "–") == dashes
        assert " / " in cells[5]
    for before, after in zip(old.rows, faults.without(old).rows, strict=True):
        assert before.time_ms("ours") == after.time_ms("ours")
        assert (before == after) == (before.kind != "bwd")
    masked = masked_run()
    assert faults.without(masked) is masked


def test_a_rival_of_one_shape_is_no_row_of_a_table():
    """A mean over one shape of seven stood there, beside a stand-in."""
    rows = [*SETS["conv"]["packs"], *SETS["conv"]["trees"]]
    whole = shared_run(rows, {"ours": 1.0, "fa4": 17.0})

    def timed_at(shapes):
        """The record with a rival at so many shapes of each direction."""
        kept = {row.layout for row in whole.rows[:shapes]}
        alone = [
            row if row.layout in kept else dataclasses.replace(row, results=row.results[:1])
            for row in whole.rows
        ]
        return dataclasses.replace(whole, rows=tuple(alone))

    subject = "Causal convolution, forward; "
    for shapes in (1, 2, 4):
        run = timed_at(shapes)
        text = findings.page([run], current)
        assert (subject in text) == (shapes == 4)
        if shapes == 4:
            assert cells_of(text, subject)[0].endswith("; 4 of 7 shapes")
        on_front = front([run], current)  # whose gains do not stand on it
        assert subject not in on_front
        assert "causal convolution: NVIDIA" not in on_front
        assert "forward 50 % of a copy's speed" in findings.page([run], current)
    assert cells_of(findings.page([whole], current), subject)[0].endswith("; 7 shapes")


def test_a_time_that_was_not_captured_is_no_graph_s():
    """The block's stood there as one. A rival's alone has a star."""
    run = block_run()
    start = "Hybrid models over shared prompts, block of four layers"
    assert cells_of(front([run], current), start)[3] == "10.0 / 45.0"

    def launched(*names: str) -> list[str]:
        rows = []
        for row in run.rows:
            of = [dataclasses.replace(r, graph=r.implementation not in names) for r in row.results]
            rows.append(dataclasses.replace(row, results=of))
        return cells_of(front([dataclasses.replace(run, rows=tuple(rows))], current), start)

    assert launched("ours", "whole")[3:] == ["–", "–", "10.0 / 45.0", "4.50 x (4.50)"]
    assert launched("whole")[3] == "10.0 / 45.0*"


def test_words_of_the_table_are_defined_where_it_stands():
    text = front([anchor_run()], current)
    for word in ("Rival", "Heads", "Faster", "Worst", "typical", "Graph", "Eager"):
        assert f"**{word}**" in text
    for number in ("▼", "20 times as fast", "what you would replace"):
        assert number in text


def test_without_eager_times_the_front_page_has_dashes():
    run = shared_run([*DUALKV["long"], *DUALKV["short"]], TIMES)
    cells = cells_of(front([run], current), "Attention over shared prompts, backward")
    assert cells[3:] == ["1.00 / 3.00", "3.00 x (3.00)", "–", "–"]
    assert cells[2] == "FA4, whole sequences"


def test_a_mask_is_beside_all_pairs_on_the_front_page():
    text = front([masked_run()], current)
    cells = cells_of(text, "Sparse attention, forward")
    assert cells[2:5] == ["FA4, no mask", "2.00 / 30.0", "15.00 x (15.00)"]
    assert "mask keeps: **15.0 x** as fast as dense with 5 % of the pairs" in text
    assert "beside flash-attn-4 over all pairs; with 5 % of the pairs 20 x would be ideal" in text
    assert "Sparse attention, index" not in text  # it has no rival
    assert "Choosing the mask of sparse attention takes 2.00 ms a call more (" in text


def test_a_mean_of_two_groups_of_shapes_has_both():
    """The mean of 16/32 heads hid that the GPU's filled shapes gain a few percent."""
    run = anchor_run()
    filled = {workload.name for workload in GDN["filled"]}
    rows = [row for row in run.rows if (row.kind, row.heads) == ("fwd", "16/32")]
    pair = []
    for full in (False, True):
        some = [row for row in rows if (row.name in filled) == full]
        ratios = [tables.ratio(row, tables.our_names(run)) for row in some]
        pair.append(f"{min(ratios):.2f} to {max(ratios):.2f} x")
    assert f"{pair[0]} and {pair[1]} with 16/32 heads" in findings.page([run], current)
    assert "shapes of two groups" not in findings.page([run_of(GDN["decode"])], current)


def test_each_head_size_has_its_line():
    """One mean was of three sizes, and the model of one of them stood on no front page."""
    run = run_of(GDN["sizes"])
    for K, V in ((96, 192), (128, 256), (256, 512)):
        assert f"| head sizes {K}/{V} " in findings.page([run], current)
    rows = [row for row in run.rows if row.name.endswith("d96x192") and row.kind == "fwd"]
    page = findings.page([anchor_run(), run], current)
    assert "| Gated delta net, forward; 30/30 heads of 96/192; 2 shapes " in page
    # backwards of other kernels than today's are said to be, though these kernels are as they were
    assert "its heads of 96/192 (backward)" in page
    assert f": {headline.source(run)}, other kernels run since" in page
    kernels = {f"gdn.wide_grads-bf16-k{K}": "as it is" for K in (128, 256)}
    newer = dataclasses.replace(run, kernels=kernels)
    assert "other kernels run since" not in findings.page([anchor_run(), newer], current)
    # a newer record of this size alone counts, and the others keep theirs
    newer = dataclasses.replace(run, rows=tuple(rows), date="2026-12-01T00:00:00+00:00")
    lines = findings.page([run, newer], current).splitlines()
    dates = ["2026-12-01" in line for line in lines if line.startswith("| head sizes ")]
    assert dates == [True, False, False, False, False, False]


def test_pages_say_where_ours_is_slower():
    """Every case on the page of performance, the worst of each on the front page."""
    run, ours = anchor_run(), tables.our_names(anchor_run())
    rows = [row for row in run.rows if row.kind == "fwd"]
    ratios = [tables.ratio(row, ours) for row in rows]
    count = sum(map(tables.is_slower, ratios))
    assert count
    mean = f"mean {math.prod(ratios) ** (1 / len(ratios)):.2f} x"
    said = f"{count} of {len(ratios)} shapes ({mean}, worst {min(ratios):.2f} x)"
    page = findings.page([run], current)
    assert f"- Gated delta net, forward: CUDA graphs at {said}" in page
    least = min(tables.ratio(row, ours, eager) for row in rows for eager in (False, True))
    (line,) = [x for x in front([run], current).splitlines() if x.startswith("- Gated delta net, ")]
    text = line.partition(f"forward: {least:.2f} x at ")[2].partition(" (2 more kinds of rows)")[0]
    shape, _, rival = text.partition(", beside ")
    assert shape in map(names.shape_of, rows)
    assert rival in run.labels.values()
    assert "Where ours is slower" not in front([masked_run()], current)
    assert "Ours is slower" not in findings.page([masked_run()], current)


def test_older_cases_are_apart_and_others_say_where():
    older = run_of(GDN["decode"])
    assert "measured with an older version" in findings.page([older], current)
    text = front([older], current)  # it said how many there were, and not how slow
    assert "- 1 more kind of rows in records of 2026-01-02, of older kernels" in text
    ratios = {
        way: min((tables.ratio(row, tables.our_names(older), eager), row) for row in older.rows)
        for way, eager in (("eager calls", True), ("CUDA graphs", False))
    }
    for way, (least, row) in ratios.items():
        said = f"{way} {least:.2f} x (Gated delta net, decoding, 64 to 256 sequences; "
        assert (f"{said}{names.shape_of(row)}) beside " in text) == tables.is_slower(least)
    newer = dataclasses.replace(older, environment={"our_kernels": "prebuilt by nvcc 13"})
    assert "measured with an older version" not in findings.page([newer], current)
    assert "of older kernels" not in front([newer], current)
    for text, where in (
        (front([newer], current), ""),
        (front([newer], other), ", kernels changed since"),
    ):
        line = next(
            x for x in text.splitlines() if x.startswith("- Gated delta net, decoding, 64 ")
        )
        assert line.endswith(f" (H200, 2026-01-02{where})")


def test_slower_rows_of_every_family_s_sets_are_listed():
    """Shared prompts with one response were left out: only gdn's sets were looked at."""
    growing = shared_run(DUALKV["responses"], {"ours": 1.0, "fa4": 0.9, "fa4_shared": 2.0})
    text = findings.page([growing], current)
    line = next(x for x in text.splitlines() if "more and more responses" in x and "forward" in x)
    assert "CUDA graphs at 7 of 7 shapes (mean 0.90 x, worst 0.90 x); worst at" in line
    assert line.endswith(" beside flash-attn-4, whole sequences.")
    assert "measured with an older version" in text
    largest = shared_run(
        DUALKV["largest"], {"ours": 1.0, "bwd fa4_shared": 0.9}, environment={"our_kernels": "new"}
    )
    text = findings.page([largest], current)
    assert (
        "- Attention over shared prompts, backward, the largest: CUDA graphs 0.90 x; worst at 28 "
        "responses of 2048 to a prompt of 32768, beside three flash-attn-4 calls a group, put "
        "together by hand (H200, 2026-01-02)."
    ) in text
    assert "shared prompts, forward, the largest" not in text
    assert "measured with an older version" not in text


def test_no_row_that_tables_mark_as_slower_is_missing_in_the_list():
    runs, digests = [*map(faults.without, records.load())], pages.recorded()
    marked = "".join(pages.records_page(runs, family, digests) for family in SETS)
    listed = slower.sections(runs, digests)
    of = [(tables.our_names(s.run), row) for s in listed for row in s.rows]
    slow = [row for ours, row in of if (tables.ratio(row, ours) or 1) < 1]
    assert marked.count(tables.SLOWER) > len(slow) > 0
    shown = [headline.headline(runs, family, digests) for family in SETS]
    shown += [select.aside(runs, f, x, digests) for f, sets in pages.ASIDE.items() for x in sets]
    rows = [row for run in shown if run for row in run.rows]
    assert all(any(row in section.rows for section in listed) for row in rows)


def block_run():
    """A hybrid block's record, whose heads are those of both kinds of layer."""
    run = shared_run(SETS["hybrid"]["block"], {"ours": 10.0, "whole": 45.0})
    rows = (dataclasses.replace(row, heads="16/32, 2/16") for row in run.rows)
    return dataclasses.replace(run, rows=tuple(rows))


def test_a_block_of_a_hybrid_model_is_beside_whole_sequences():
    text = front([block_run()], current)
    start = "Hybrid models over shared prompts, block of four layers; 16/32, 2/16 heads; 4 shapes"
    assert cells_of(text, start)[2:4] == ["whole sequences, same kernels", "10.0 / 45.0"]
    page = findings.page([block_run()], current)
    assert "whole sequences take 4.50 times as long as ours](figures/hybrid-block" in page
    assert "notes/hybrid-trees.md" not in page  # cited while there is no record
    assert "notes/hybrid-trees.md" in findings.page([], current)


def test_what_users_get_is_the_step_of_the_record():
    run = shared_run(DUALKV["long"], {"ours": 1.0, "fwd fa4": 2.0, "bwd fa4": 3.5})
    said = "attention **2.8 x** as fast as on whole sequences"
    assert said in front([run], current)
    step = [dataclasses.replace(w, direction="both") for w in GDN["anchors"][21:24]]
    both = run_of([*GDN["anchors"], *step])
    ratios = [tables.ratio(row, tables.our_names(both)) for row in both.rows if row.kind == "both"]
    mean = math.prod(ratios) ** (1 / 3)
    line = cells_of(front([both], current), "Gated delta net, forward and backward; 16/32")
    assert line[4].startswith(f"{mean:.2f} x")
    text = front([shared_run(SETS["hybrid"]["block"], {"ours": 10.0, "whole": 45.0})], current)
    assert "four layers of Qwen3-Next's sizes **4.5 x**" in text


def test_users_of_fla_find_their_own_gain_in_a_row():
    """It stood on another page: the best rival was the only one here."""
    step = [dataclasses.replace(w, direction="both") for w in GDN["anchors"][21:24]]
    run = run_of([*GDN["anchors"], *step])
    kinds = [[row for row in run.rows if row.kind == kind] for kind in ("fwd", "both")]
    forward, both = (spread.beside(rows, "fla") for rows in kinds)
    ratios = [row.time_ms("fla") / row.time_ms("ours") for row in kinds[0]]
    assert forward == spread.spread(ratios)
    text = front([run, run_of(GDN["sizes"], id="sizes")], current)
    eager = [spread.beside(rows, "fla", True) for rows in kinds]
    said = f"forward + backward {ends(eager[1])} as fast as FLA's with heads of 128; forward **"
    row = cells_of(text, "train gated delta net layers of **flash-linear-attention**")[2]
    assert said in row
    assert " x** with heads of its default layer, 256/512" in row
    pairs = ("forward", forward, eager[0]), ("forward + backward", both, eager[1])
    for title, graph, call in pairs:
        assert f" {title} {graph.said} in CUDA graphs, {call.said} in eager calls (" in text
    rows = (dataclasses.replace(row, results=row.results[:1]) for row in run.rows)
    alone = dataclasses.replace(run, rows=tuple(rows))
    assert "Beside FLA's kernels" not in front([alone], current)


def test_the_first_table_has_one_form_of_range():
    """In a row it was of two means, in the others of the least and the greatest shape."""
    text = headline.front_page(records.load(), pages.recorded())["gains"]
    assert "mean" not in text
    assert "at least" not in text.replace("at least 2 times as long as a response", "")


def test_serving_s_row_is_of_the_records():
    """Its numbers were typed by hand; which shapes they were of stood nowhere."""
    parts = headline.front_page(records.load(), pages.recorded())
    runs, digests = records.load(), pages.recorded()
    prompts, shared = (
        select.aside(runs, "gdn", f"serving-{x}", digests) for x in ("prefill", "parallel")
    )
    rows = [row for row in prompts.rows if "fp32" in row.what]
    rows += [r for r in shared.rows if r.kind == "pool_prefill" and r.heads in ("16/32", "16/64")]
    said = f"prefill {ends(spread.beside(rows, 'flashinfer_gathers'))} as fast as vLLM's way"
    assert said in parts["gains"]
    for row in rows:
        assert f"{names.shape_of(row)} of {row.heads} heads" in parts["performance"]
    assert "not measured yet" in front([anchor_run()], current)


def test_the_front_page_s_table_has_the_lines_behind_its_gains():
    """It had all 18, most of heads that the first table does not name."""
    table = headline.times(records.load(), pages.recorded(), front=True).splitlines()[2:]
    every = headline.times(records.load(), pages.recorded()).splitlines()[2:]
    subjects = {line.split(" | ")[0].strip("| ") for line in table}
    assert subjects < {line.split(" | ")[0].strip("| ") for line in every}
    assert len(table) <= 10
    for start in ("Gated delta net, forward and", "Models", "Attention", "Hybrid", "Sparse"):
        assert any(subject.startswith(start) for subject in subjects)


def test_records_say_how_kernels_were_launched():
    assert "Our kernels were" not in raw([anchor_run()], current)
    assert "older than the replay of calls" in front([anchor_run()], current)
    run = anchor_run(environment={"our_kernels": "prebuilt by nvcc 13"})
    assert "Our kernels were prebuilt by nvcc 13." in raw([run], current)
    assert "older than the replay of calls" not in front([run], current)


def test_a_record_of_one_s_own_is_printed_by_its_path(tmp_path, capsys):
    """Only records of the repository could be printed."""
    path = tmp_path / "gdn.json"
    path.write_text(json.dumps(dataclasses.asdict(anchor_run(id="of-one-s-own"))))
    assert program.main(["--record", str(path)]) == 0
    said = capsys.readouterr().out
    assert "record of-one-s-own. Ceilings" in said
    assert "- Command: `python -m benchmarks.sm90 gdn --quick`" in said
    path.write_text("[]")
    for wrong, why in ((path, "it holds no run"), (tmp_path / "no.json", "No such file")):
        assert program.main(["--record", str(wrong)]) == 2
        said = capsys.readouterr().err
        assert why in said
        assert "need the FAMILY.json of --out" in said
    assert program.main(["--record", "zzzz"]) == 2
    assert "or the path of a FAMILY.json of --out" in capsys.readouterr().err


def test_a_library_without_any_time_has_its_reason_below_the_table():
    """torch's conv1d takes no packs: it was not in the table, and nothing said why."""
    run = anchor_run()

    def lacking(rows):
        none = [Result("flash_qla", "not applicable", "it has no packs")]
        return [
            dataclasses.replace(
                row, results=(*(r for r in row.results if r.implementation != "flash_qla"), *none)
            )
            for row in rows
        ]

    said = tables.footnotes(dataclasses.replace(run, rows=tuple(lacking(run.rows))))
    assert f"FlashQLA, {len(run.rows)} rows: not applicable: it has no packs" in said
    some = (*lacking(run.rows[:1]), *run.rows[1:])
    assert "no packs" not in tables.footnotes(dataclasses.replace(run, rows=some))


def test_words_in_place_of_a_time_and_directions_are_explained():
    page = pages.records_index([], current)
    own = page[page.index("## Your own times") : page.index("## Workloads")]
    for word in (WRONG, UNSUPPORTED, MEMORY, TIME_LIMIT, DIED, FAILED, MISSING):
        assert f"*{word}*" in " ".join(own.split()), word
    for word in (*DIRECTIONS, "--plot", "--record PATH", "1x48", "1.3 GB"):
        assert f"`{word}" in own or word in " ".join(own.split()), word
    assert "engine_interfaces" not in own  # the table of docs/installation.md has it


def test_batches_that_tables_name_by_letters_are_defined():
    page = raw([], current, "dualkv")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    assert ["C", "1", "32768", "16", "2048"] in cells
    labels = {row[0] for row in cells if len(row) == 5}
    assert {w.label for w in (*DUALKV["long"], *DUALKV["short"])} <= labels
    text = findings.page([], current)
    assert "| C: 16 responses of 2048 to a prompt of 32768 " in text
    assert all(f"| {label}: " in text for label in labels - {"batch", "-----"})


def test_every_number_says_where_it_was_measured():
    run = anchor_run()
    where = "NVIDIA H200, 2026-01-02, commit 0000000000"
    assert f"Measured on: gated delta net: {where}." in front([run], current)
    drawn = pictures.figures([run], current)
    assert set(drawn) == {"gdn-fwd-16x32"}
    assert where in drawn["gdn-fwd-16x32"].subtitle


def test_every_column_of_the_records_is_defined():
    headers = set()
    for family in SETS:
        lines = raw(records.load(), pages.recorded(), family).splitlines()
        for header, rule in itertools.pairwise(lines):
            if re.fullmatch(r"\|( -+:? \|)+", rule) and "batch" not in header:
                headers.update(cell.strip() for cell in header.split("|")[1:-1])
    text = pages.records_index([], current).partition("## Columns")[2].partition("\n## ")[0]
    libraries = {label for run in records.load() for label in run.labels.values()}
    steps = {"backward", "sum", "eager p20", *(x for x in headers if x.endswith(": forward"))}
    for name in headers - libraries - steps:
        assert name.partition(", ours")[0] in text, name
    assert {"rival / ours", "worst error", "host, additions"} <= headers


def test_a_record_of_other_kernels_is_stale():
    run = anchor_run()
    today = "digests of the generated code that ran, and they equal this checkout's"
    for digests in (current, other):
        text = front([run], digests)
        assert ("Kernels changed since" in text) == (today not in text) == (digests is other)
    assert today not in front([], current)
    assert "Stale" not in raw([run], current)
    assert "**Stale:** the kernels changed since" in raw([run], other)
    assert "| stale" in pages.records_index([run], other)


def test_the_page_of_findings_is_short_and_has_no_targets():
    text = findings.page(records.load(), pages.recorded())
    # 180 before serving, slower cases, sizes, other GPUs; 260 before models and ranks
    assert len(text.splitlines()) <= 270
    assert "required" not in text
    assert text.index("## Words") < text.index("## In one table")


def test_pictures_are_described():
    text = findings.page(records.load(), pages.recorded())
    said = re.findall(r"!\[(.*?)\]\(figures/", text)
    assert len(said) >= 4
    assert all(" take" in words for words in said)


def test_a_record_without_every_anchor_row_makes_no_headline():
    partial = run_of(GDN["anchors"][:5])
    assert select.headline([partial], "gdn", current) is None
    older = anchor_run()
    assert select.headline([older, partial], "gdn", current) == older
    on_cpu = anchor_run(device_kind="cpu")
    assert select.headline([on_cpu], "gdn", current) is None


def test_the_newest_complete_record_is_the_headline():
    runs = [anchor_run(id="old"), anchor_run(id="new")]
    assert "`new`" in raw(runs, current)
    assert "`old`" not in raw(runs, current)
    assert "`old`" in pages.records_index(runs, current)


def test_half_of_the_rows_of_todays_kernels_are_the_headline_before_older_ones():
    quick = GDN["anchors"]
    older, least = anchor_run(id="older"), len(quick) // 2 + 1
    today = {"gdn.gate-fp32": "today"}
    half, too_few = (run_of(quick[:n], id=f"{n}", kernels=today) for n in (least, 3))
    assert select.headline([half, older, too_few], "gdn", today).id == half.id
    assert select.headline([too_few, older], "gdn", today).id == "older"


def test_of_two_records_alike_the_headline_has_more_rivals():
    many, few = anchor_run(id="many"), anchor_run(id="few", labels={"ours": "ours"})
    assert select.headline([many, few], "gdn", current).id == "many"
    assert select.headline([few, many], "gdn", current).id == "many"


def test_a_section_beside_the_headline_is_about_todays_kernels_if_half_of_it_is():
    rows = GDN["decode"]
    older = run_of(rows, id="older", kernels={"gdn.gate-fp32": "before"})
    half, few = run_of(rows[: len(rows) // 2], id="half"), run_of(rows[:2], id="few")
    assert select.aside([half, older, few], "gdn", "decode", current).id == "half"
    assert select.aside([few, older], "gdn", "decode", current).id == "older"


def test_rivals_alone_are_said_to_be_alone():
    assert "rivals only" in raw([anchor_run(with_ours=False)], current)


def test_single_kernels_and_the_cpu_path_have_their_own_sections():
    kernels = run_of(GDN["kernels"], id="alone")
    cpu = run_of(GDN["cpu"], id="cpu", device_kind="cpu", device="a laptop")
    text = raw([kernels, cpu], current)
    assert "## Kernels alone" in text
    assert "kkt_solve alone, model gates; ms" in text
    assert "Forward of 4096 tokens, 16/16 heads of 128, float32" in text
    assert "on a laptop (record `cpu`)" in text


def test_every_set_beside_the_headlines_has_one_section_and_a_row_stands_in_one():
    both = shared_run([*DUALKV["long"], *DUALKV["short"]], TIMES, id="long-and-short")
    fewer = shared_run(DUALKV["short"][:4], TIMES, id="fewer")
    again = shared_run(DUALKV["short"], TIMES, id="short-again")
    layer = shared_run(SETS["dualkv"]["layer"], TIMES, id="whole-layers")
    text = raw([both, again, fewer, layer], current, "dualkv")
    _, anchors, short, layers = text.split("\n## ")
    assert "long-and-short" in anchors
    assert "| S1 " not in anchors
    assert short.startswith("Short batches")
    assert "`short-again`" in short  # as many rows as there are, and the newest of those
    assert "| S8 " in short
    assert layers.startswith("A decoder layer")
    assert "`whole-layers`" in layers
    assert set(pages.ASIDE) == set(SETS)
    for family, sets in pages.ASIDE.items():
        assert set(sets) <= set(SETS[family])


def test_text_outside_the_markers_stays():
    text = "before\n<!-- a:start -->\nold\n<!-- a:end -->\nafter\n"
    assert pages.between_markers(text, "a", "new") == (
        "before\n<!-- a:start -->\nnew\n<!-- a:end -->\nafter\n"
    )
    with pytest.raises(ValueError, match=r"README\.md lacks"):
        pages.between_markers(text, "b", "new")


def test_generated_files_are_what_the_records_say():
    """If this fails: `python -m benchmarks.report`."""
    for path, text in pages.texts(records.load()).items():
        assert path.exists(), f"{path.name} is missing: run `python -m benchmarks.report`"
        assert path.read_text() == text, f"{path.name}: run `python -m benchmarks.report`"


def test_no_picture_lies_there_that_no_page_shows():
    shown = "".join(page.read_text() for page in (pages.ROOT / "docs").rglob("*.md"))
    shown += (pages.ROOT / "README.md").read_text()
    lying = {path.name for path in pages.FIGURES.iterdir()}
    assert not {name for name in lying if name not in shown}
