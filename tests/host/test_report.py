"""Records, tables, figures and generated pages say what was measured, and what was not."""

import dataclasses
import json
import math

import pytest

from benchmarks.attention.workloads import DUALKV, REQUIRED
from benchmarks.gdn.workloads import GDN
from benchmarks.harness import records
from benchmarks.harness.records import OK, Result
from benchmarks.hybrid.workloads import HYBRID, SHAPES
from benchmarks.report import pages, tables
from benchmarks.report.figures import draw, draw_growth
from benchmarks.sm90 import SETS
from tests.host.made_up_runs import KERNELS, anchor_run, run_of, shared_run

current, other = KERNELS, {"gdn.gate-fp32": "something else"}


# --- records


def test_records_come_back_as_they_were_appended(tmp_path):
    first, second = anchor_run(failures=True), run_of(GDN["kernels"], id="gdn-2", date="2026-02-03")
    for run in (second, first):
        path = records.append(run, tmp_path)
    assert path.name == "2026-01-02-nvidia-h200.jsonl"
    assert records.load(tmp_path) == [first, second]


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
    header, _, line, _ = tables.summary(run).splitlines()[2:6]
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
    assert "Rows not slower than the best rival: 0 of 1 in CUDA graphs (worst ratio" in (
        pages._counts(dataclasses.replace(run, rows=(lone,)))
    )


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
    cells = {c[1]: c[2:] for c in ([x.strip() for x in line.split("|")] for line in lines[4:])}
    assert cells["S1"][:6] == ["1.45", "1.10 ▼", "1.27", "3.00", "3.00", "3.00"]
    assert cells["S5"][:3] == ["1.45", "1.10", "1.27 ▼"]  # 1.3 in sum
    assert cells["S6"][:3] == ["1.45", "1.10", "1.27"]  # 1.2 in sum
    required = {label: row[6] for label, row in cells.items()}
    assert required["S1"] == "1.3 each"
    assert [required[label] for label in ("S5", "S8")] == ["1.3 in sum", "1.0 in sum"]
    assert set(REQUIRED) == {w.label for w in DUALKV["short"]}
    one_way = shared_run([w for w in DUALKV["short"] if w.direction == "fwd"], TIMES)
    assert "their sum" not in tables.summary(one_way)


def test_heads_of_256_are_held_to_the_three_calls():
    text = tables.summary(shared_run(DUALKV["wide"], {**TIMES, "bwd fa4_shared": 0.9}))
    lines = text[text.index("Forward, backward and their sum") :].splitlines()
    cells = [[x.strip() for x in line.split("|")][1:-1] for line in lines[4:10]]
    assert {row[0] for row in cells} == {"2/16", "4/16"}
    assert {row[1] for row in cells} == {w.label for w in DUALKV["wide"]}
    assert all(row[2:4] == ["1.45", "0.90 ▼"] and row[-1] == "1.0 each" for row in cells)


def test_a_block_is_held_to_what_it_has_to_reach():
    ratios = {"ours": 1.0, "whole": 3.5}
    text = tables.summary(shared_run(HYBRID["block"], ratios))
    shown = [label for label in SHAPES if f"3.50 {tables.SLOWER}" in line_of(text, label)]
    assert shown == ["16x8192+1024", "28x16384+2048", "64x2048+512"]


def line_of(text, label):
    return next(line for line in text.splitlines() if label in line)


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


def drawn(run, folder):
    return {path.name for path in draw(run, folder)}


def test_figures_come_as_png_and_svg_by_direction(tmp_path):
    names = drawn(anchor_run(), tmp_path)
    assert names == {
        f"gdn-{kind}-{what}.{ending}"
        for kind in ("fwd", "bwd")
        for what in ("latency", "ratio", "floor")
        for ending in ("png", "svg")
    }
    assert all((tmp_path / name).stat().st_size > 2000 for name in names)


def test_svg_figures_are_the_same_each_time(tmp_path):
    run = run_of(GDN["anchors"][:7])
    texts = []
    for _ in range(2):
        draw(run, tmp_path)
        texts.append((tmp_path / "gdn-fwd-latency.svg").read_text())
    assert texts[0] == texts[1]


def test_no_ratio_figure_without_ours(tmp_path):
    names = drawn(anchor_run(with_ours=False), tmp_path)
    assert "gdn-fwd-latency.png" in names
    assert not any("ratio" in name for name in names)


def test_different_gates_are_different_figures_and_a_lone_row_is_none(tmp_path):
    workloads = [*GDN["forward"][:3], *GDN["published"][:3], *GDN["published-h0"][:1]]
    names = drawn(run_of(workloads), tmp_path)
    assert "gdn-fwd-model-gates-latency.png" in names
    assert "gdn-fwd-published-gates-latency.png" in names
    assert not any("initial" in name for name in names)
    lone = drawn(run_of(GDN["cpu"]), tmp_path)
    assert "gdn-fwd-latency.png" in lone


def test_time_against_the_number_of_responses(tmp_path):
    (png, svg) = draw_growth(shared_run(DUALKV["responses"], TIMES), tmp_path)
    assert png.stat().st_size > 2000
    text = svg.read_text()
    assert all(f">{word}<" in text for word in ("Forward", "Backward", "64", "responses"))
    too_few = [w for w in DUALKV["responses"] if w.label in ("1x4096+512", "2x4096+512")]
    assert draw_growth(shared_run(too_few, TIMES), tmp_path) == []


# --- generated pages


def test_without_a_record_the_pages_say_so():
    for text in (pages.readme_section([], current), pages.performance_page([], current)):
        assert "No record on an SM90 GPU yet" in text
        assert "python -m benchmarks.sm90 gdn --quick --save" in text


def test_the_headline_has_graph_replays_and_eager_calls():
    """Calls without a graph are slower, and in another order."""
    run = anchor_run()
    text = pages.readme_section([run], current)
    header = next(line for line in text.splitlines() if line.startswith("|"))
    assert header.count("best rival / ours") == 2
    assert header.index("CUDA graphs: rows") < header.index("eager calls: rows")
    said = []
    for way, eager in (("CUDA graphs", False), ("eager calls", True)):
        ratios = [tables.ratio(row, tables.our_names(run), eager) for row in run.rows]
        fine = sum(r >= 1 for r in ratios)
        said.append(f"{fine} of {len(ratios)} in {way} (worst ratio {min(ratios):.2f} ▼)")
    assert f"Rows not slower than the best rival: {', '.join(said)}." in text
    assert "; ms, CUDA graph replays / eager calls\n" in pages.performance_page([run], current)
    assert "CUDA graph" not in tables.summary(anchor_run(device_kind="cpu"))


def test_without_eager_times_the_headline_has_dashes():
    run = shared_run([*DUALKV["long"], *DUALKV["short"]], TIMES)
    text = pages.readme_section([run], current)
    assert "in CUDA graphs (worst ratio 1.10), – in eager calls." in text
    lines = [line for line in text.splitlines() if line.startswith("| Backward")]
    assert [cell.strip() for cell in lines[0].split("|")[-5:-1]] == ["–"] * 4


def test_the_headline_says_how_kernels_were_launched():
    assert "Our kernels were" not in pages.readme_section([anchor_run()], current)
    run = anchor_run(environment={"our_kernels": "prebuilt by nvcc 13"})
    assert "Our kernels were prebuilt by nvcc 13." in pages.readme_section([run], current)


def test_batches_that_tables_name_by_letters_are_defined():
    page = pages.performance_page([], current)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    assert ["C", "1", "32768", "16", "2048"] in cells
    labels = {row[0] for row in cells if len(row) == 5}
    assert {w.label for w in (*DUALKV["long"], *DUALKV["short"])} <= labels


def test_a_record_of_other_kernels_is_stale():
    run = anchor_run()
    assert "Stale" not in pages.readme_section([run], current)
    assert "**Stale:** the kernels changed since" in pages.readme_section([run], other)
    assert "| stale" in pages.performance_page([run], other)


def test_a_record_without_every_anchor_row_makes_no_headline():
    partial = run_of(GDN["anchors"][:5])
    assert pages.headline([partial], "gdn", current) is None
    older = anchor_run()
    assert pages.headline([older, partial], "gdn", current) == older
    on_cpu = anchor_run(device_kind="cpu")
    assert pages.headline([on_cpu], "gdn", current) is None


def test_the_newest_complete_record_is_the_headline():
    runs = [anchor_run(id="old"), anchor_run(id="new")]
    assert "`new`" in pages.readme_section(runs, current)
    assert "`old`" not in pages.readme_section(runs, current)
    assert "`old`" in pages.performance_page(runs, current)


def test_half_of_the_rows_of_todays_kernels_are_the_headline_before_older_ones():
    quick = GDN["anchors"]
    older, least = anchor_run(id="older"), len(quick) // 2 + 1
    today = {"gdn.gate-fp32": "today"}
    half, too_few = (run_of(quick[:n], id=f"{n}", kernels=today) for n in (least, 3))
    assert pages.headline([half, older, too_few], "gdn", today).id == half.id
    assert pages.headline([too_few, older], "gdn", today).id == "older"


def test_of_two_records_alike_the_headline_has_more_rivals():
    many, few = anchor_run(id="many"), anchor_run(id="few", labels={"ours": "ours"})
    assert pages.headline([many, few], "gdn", current).id == "many"
    assert pages.headline([few, many], "gdn", current).id == "many"


def test_a_section_beside_the_headline_is_about_todays_kernels_if_half_of_it_is():
    rows = GDN["decode"]
    older = run_of(rows, id="older", kernels={"gdn.gate-fp32": "before"})
    half, few = run_of(rows[: len(rows) // 2], id="half"), run_of(rows[:2], id="few")
    assert pages.aside([half, older, few], "gdn", "decode", current).id == "half"
    assert pages.aside([few, older], "gdn", "decode", current).id == "older"


def test_rivals_alone_are_said_to_be_alone():
    assert "rivals only" in pages.readme_section([anchor_run(with_ours=False)], current)


def test_single_kernels_and_the_cpu_path_have_their_own_sections():
    kernels = run_of(GDN["kernels"], id="alone")
    cpu = run_of(GDN["cpu"], id="cpu", device_kind="cpu", device="a laptop")
    text = pages.performance_page([kernels, cpu], current)
    assert "### Kernels alone" in text
    assert "kkt_solve alone, model gates; ms" in text
    assert "Forward of 4096 tokens, 16/16 heads of 128, float32" in text
    assert "on a laptop (record `cpu`)" in text


def test_every_set_beside_the_headlines_has_one_section_and_a_row_stands_in_one():
    both = shared_run([*DUALKV["long"], *DUALKV["short"]], TIMES, id="long-and-short")
    fewer = shared_run(DUALKV["short"][:4], TIMES, id="fewer")
    again = shared_run(DUALKV["short"], TIMES, id="short-again")
    layer = shared_run(SETS["dualkv"]["layer"], TIMES, id="whole-layers")
    text = pages.performance_page([both, again, fewer, layer], current)
    head, shared = text.split("## Attention over shared prompts\n")
    shared = shared.split("## Vertical-slash attention")[0]
    anchors, short, layers = shared.split("### ")
    assert "### Short batches" not in head
    assert "long-and-short" in anchors
    assert "S1" not in anchors
    assert short.startswith("Short batches")
    assert "`short-again`" in short  # as many rows as there are, and the newest of those
    assert "S8" in short
    assert layers.startswith("A decoder layer")
    assert "`whole-layers`" in layers
    assert set(pages.ASIDE) == set(SETS)
    for family, sets in pages.ASIDE.items():
        assert set(sets) <= set(SETS[family])


def test_text_outside_the_markers_stays():
    text = f"before\n{pages.START}\nold\n{pages.END}\nafter\n"
    assert pages.between_markers(text, "new") == (
        f"before\n{pages.START}\nnew\n{pages.END}\nafter\n"
    )
    with pytest.raises(ValueError, match=r"README\.md lacks"):
        pages.between_markers("no markers", "new")


def test_readme_and_performance_page_are_what_the_records_say():
    """If this fails: `python -m benchmarks.report`."""
    for path, text in pages.texts(records.load()).items():
        assert path.exists(), f"{path.name} is missing: run `python -m benchmarks.report`"
        assert path.read_text() == text, f"{path.name}: run `python -m benchmarks.report`"


def test_no_picture_lies_there_that_no_page_shows():
    shown = "".join(page.read_text() for page in (pages.ROOT / "docs").rglob("*.md"))
    shown += (pages.ROOT / "README.md").read_text()
    lying = {path.name for path in (pages.ROOT / pages.FIGURES).iterdir()}
    assert not {name for name in lying if name not in shown}
