"""Records are kept and mended, all of them print, and tables have what the newest ones say."""

import dataclasses
import json
import re
from xml.etree import ElementTree

import pytest

from benchmarks import chart, show, tables
from benchmarks.attention.workloads import DUALKV, SPARSE_RING
from benchmarks.gdn.workloads import GDN
from benchmarks.harness import records
from benchmarks.harness.records import OK, UNSUPPORTED, Result
from tests.host.made_up_runs import anchor_run, run_of, shared_run

TIMES = {"ours": 1.0, "fwd fa4_shared": 1.45, "bwd fa4_shared": 1.1, "fa4": 3.0}


# --- records


def test_records_come_back_as_they_were_appended(tmp_path):
    first, second = anchor_run(failures=True), run_of(GDN["kernels"], id="gdn-2", date="2026-02-03")
    for run in (second, first):
        path = records.append(run, tmp_path)
    assert path.name == "2026-01-02-nvidia-h200.jsonl"
    assert records.load(tmp_path) == [records.as_called(first), second]


def test_a_record_file_is_only_appended_to_and_other_lines_are_passed_over(tmp_path):
    path = records.append(anchor_run(), tmp_path)
    before = path.read_text()
    with path.open("a") as file:
        file.write(json.dumps({"entry": "device_check", "passed": 3}) + "\n")
    records.append(anchor_run(id="again"), tmp_path)
    assert path.read_text().startswith(before)
    assert [run.id for run in records.load(tmp_path)] == [anchor_run().id, "again"]


def test_every_line_is_strict_json(tmp_path):
    broken = Result("ours", "wrong", "ht is off by nan", errors={"ht": None})
    row = dataclasses.replace(anchor_run().rows[0], results=(broken,))
    path = records.append(run_of([], rows=(row,)), tmp_path)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_eager_times_of_a_choice_undone_count_since_calls_undo_it():
    older = anchor_run()
    newer = dataclasses.replace(older, date="2026-12-01T00:00:00+00:00")
    assert records.as_called(newer) == newer
    timed = [x for row in older.rows for x in row.results if x.time_ms(True)]
    known = [x for row in records.as_called(older).rows for x in row.results if x.time_ms(True)]
    assert {x.implementation for x in timed} - {x.implementation for x in known} == {"ours_train"}


def test_a_backward_that_computed_more_than_in_a_step_has_no_graph_time():
    """FlashQLA's, without the segments that its forward keeps; eager calls had them."""
    old = run_of(GDN["anchors"])
    for before, after in zip(old.rows, records.as_called(old).rows, strict=True):
        assert before.time_ms("ours") == after.time_ms("ours")
        assert (tables.ratio(old, after) is None) == (before.kind == "bwd")
        assert tables.ratio(old, after, eager=True)


def test_one_sequence_of_an_older_record_is_named_as_today(tmp_path):
    run = anchor_run()
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


# --- a record in full


@pytest.mark.parametrize("run", records.load(), ids=lambda run: run.id)
def test_every_record_prints_with_every_row(run):
    text = tables.page(run)
    assert run.command in text
    assert run.date in text
    for section in text.split("\n### ")[1:]:
        rows = [x.split("|")[1:-1] for x in section.splitlines() if x.startswith("| ")][2:]
        cells = [[cell.strip() for cell in row] for row in rows]
        of_kind = [x for x in run.rows if section.startswith(tables.OPERATIONS[x.kind] + ", ms")]
        assert [x[:3] for x in cells] == [[x.heads, x.layout, x.what] for x in of_kind]
        for row, found in zip(of_kind, cells, strict=True):
            best = tables.ratio(run, row) or tables.ratio(run, row, eager=True)
            assert best is None or any(tables.marked(best) in x for x in found)
            times = [r.time_ms(r.p50_ms is None) for r in row.results if r.status == OK]
            assert all(any(tables.number(x) in cell for cell in found) for x in times)
    assert run.id in show.listed([run])


def test_failures_stand_in_their_cells_and_their_reasons_below():
    text = tables.page(anchor_run(failures=True, missing={"fla": "no module"}))
    for word in ("wrong", "time limit", "out of memory", "failed"):
        assert f" {word} |" in text
    assert "made up for row" in text
    assert "missing, FLA: no module" in text
    refused = tables.page(anchor_run(with_ours=False))
    assert f" {UNSUPPORTED} |" in refused
    assert "no CUDA kernel yet" in refused


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0623, "0.0623"), (0.392, "0.392"), (1.534, "1.53"), (34.5, "34.5"), (1700.0, "1700"),
     (0.0, "0"), (None, "–")],
)  # fmt: skip
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert tables.number(value) == text


# --- beside rivals


def test_the_ratio_is_of_the_best_rival_and_never_of_our_own_or_of_parts():
    run = anchor_run()
    row = run.rows[0]
    rivals = [r.p50_ms for r in row.results if not r.implementation.startswith("ours")]
    assert tables.ratio(run, row) == pytest.approx(min(rivals) / row.time_ms("ours"))
    shared = shared_run(DUALKV["short"], {**TIMES, "fa4_calls": 0.5})
    assert tables.ratio(shared, shared.rows[0]) == 1.45
    assert tables.marked(0.994) == f"0.99 {tables.SLOWER}"
    assert tables.marked(0.996) == "1.00"


def test_a_mask_is_beside_rivals_without_it():
    run = shared_run(SPARSE_RING["anchor"], {"ours": 2.0, "fa4": 30.0})
    masked = dataclasses.replace(run.rows[0], results=run.rows[0].results[:1])
    run = dataclasses.replace(run, rows=(masked, *run.rows[1:]))
    assert tables.rivals(run, masked) == {"fa4, no mask": 30.0}
    assert tables.ratio(run, masked) == 15.0
    assert [pair.rival for pair in tables.pairs_of(run, masked)] == ["flash-attn-4, no mask"]


def test_shared_prompts_have_both_directions_together():
    run = shared_run(DUALKV["long"], TIMES)
    sums = [row for row in tables.with_sums(run) if row.kind == "both"]
    assert [row.name for row in sums] == [f"dualkv-both-8x32-{x}" for x in "ABCD"]
    assert sums[0].time_ms("fa4_shared") == pytest.approx(2.55)
    one_way = shared_run(DUALKV["long"][:4], TIMES)
    assert [*tables.with_sums(one_way)] == [*one_way.rows]


def test_the_newest_record_with_a_rival_counts_row_by_row():
    older = anchor_run(id="gdn-older")
    alone = [dataclasses.replace(row, results=row.results[:1]) for row in older.rows]
    rows = (older.rows[0], *alone[1:])
    newer = dataclasses.replace(older, id="gdn-newer", date="2026-12-01", rows=rows)
    on_cpu = dataclasses.replace(older, id="gdn-acpu", date="2026-12-02", device_kind="cpu")
    found = {pair.row.name: pair.run.id for pair in tables.newest([older, newer, on_cpu], "gdn")}
    assert {name for name, id in found.items() if id == "gdn-newer"} == {rows[0].name}
    assert set(found.values()) == {"gdn-older", "gdn-newer"}


def test_a_group_of_rows_is_a_line_with_its_mean_and_range():
    run = anchor_run()
    rows = [row for row in run.rows if (row.kind, row.heads) == ("fwd", "16/32")]
    ratios = [tables.ratio(run, row) for row in rows]
    (line,) = [
        x for x in tables.family([run], "gdn").splitlines() if re.match(r".*16/32.*7 shap", x)
    ]
    ends = f"{tables.marked(min(ratios))} to {max(ratios):.2f}"
    assert f"{tables.mean(ratios):.2f} ({ends})" in line
    assert line.rstrip(" |").endswith("beef")
    few = run_of(GDN["anchors"][:2])
    assert "32768x1" in tables.family([few], "gdn")
    assert tables.family([few], "conv") == ""


def test_every_kind_of_workload_has_a_title():
    from benchmarks.families import SETS

    kinds = {w.kind for sets in SETS.values() for of in sets.values() for w in of}
    assert kinds <= {*tables.OPERATIONS}


# --- the command


def stub(folder, *names):
    (folder / "docs").mkdir(exist_ok=True)
    marked = "".join(f"<!-- {x}:start -->\nold\n<!-- {x}:end -->\nafter {x}\n" for x in names)
    (folder / "docs" / "performance.md").write_text(f"before\n{marked}")
    (folder / "README.md").write_text("mine\n<!-- results:start --><!-- results:end -->\nmine\n")


def test_write_fills_marked_tables_and_check_compares(tmp_path, capsys, monkeypatch):
    stub(tmp_path, *tables.TABLES)
    assert show.main(["--check"], tmp_path) == 1
    assert show.main(["--write"], tmp_path) == 0
    assert show.main(["--check"], tmp_path) == 0
    page, readme = tmp_path / "docs" / "performance.md", tmp_path / "README.md"
    assert page.read_text().startswith("before\n<!-- trainer:start -->\n| operation")
    assert "old" not in page.read_text()
    assert all(f"\nafter {table}\n" in page.read_text() for table in tables.TABLES)
    assert readme.read_text().startswith("mine\n<!-- results:start -->\n| operation")
    assert readme.read_text().endswith("<!-- results:end -->\nmine\n")
    assert (tmp_path / "docs" / "figures" / "summary.svg").stat().st_size < 8000
    readme.write_text(readme.read_text().replace("2.63", "2.64"))
    capsys.readouterr()
    assert show.main(["--check"], tmp_path) == 1
    assert "README.md: not what the records say" in capsys.readouterr().err
    faster = [dataclasses.replace(run, id=f"{run.id}0") for run in records.load()]
    monkeypatch.setattr(records, "load", lambda: faster)
    assert show.main(["--check"], tmp_path) == 1


def test_a_table_without_markers_is_an_error(tmp_path, capsys):
    stub(tmp_path, *tables.TABLES[1:])
    for way in ("--write", "--check"):
        assert show.main([way], tmp_path) == 2
        assert "need <!-- trainer:start --> and <!-- trainer:end -->" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "found"),
    [(["b99f"], ["b99f"]), (["conv", "H100"], ["6756", "d167"]), (["segments", "2026-11-27"], None),
     (["serving-parallel"], ["9b4d"]), (["ranks"], ["1dc6", "b858", "1c43", "a276"])],
)  # fmt: skip
def test_records_are_found_by_family_set_gpu_date_and_id(words, found):
    runs = show.matching(words)
    if found is None:
        assert {run.date[:10] for run in runs} == {"2026-11-27"}
        assert all("segments" in show.sets_of(run) for run in runs)
    else:
        assert [run.id[-4:] for run in runs] == found


def test_a_record_of_one_s_own_is_printed_by_its_path(tmp_path, capsys):
    path = tmp_path / "gdn.json"
    path.write_text(json.dumps(dataclasses.asdict(anchor_run(id="of-one-s-own"))))
    assert show.main([str(path)]) == 0
    assert "## of-one-s-own" in capsys.readouterr().out
    path.write_text("[]")
    for wrong, why in (
        (str(path), "it holds no record"),
        (str(tmp_path / "no.json"), "No such file"),
        ("zzzz", "no record matches; need a family, set, GPU"),
    ):
        assert show.main([wrong]) == 2
        assert why in capsys.readouterr().err


# --- figures


def test_the_front_page_s_figure_has_six_rows_and_fits_a_phone():
    text = show.summary(records.load())
    tree = ElementTree.fromstring(text)
    assert len([x for x in tree.iter() if x.get("class") == "note"]) == 6
    assert int(tree.get("width")) <= 480
    assert min(int(x) for x in re.findall(r"font(?:-size)?:(\d+)px", text)) >= 13
    assert max(float(x.get("width")) for x in tree.iter() if "rect" in x.tag) <= 480
    assert "prefers-color-scheme:dark" in text


def test_special_signs_do_not_break_a_figure():
    groups = [chart.Group("a & b", "<2x", [("<1 ms", 1.0, True), ("b", 2.0, False)])]
    ElementTree.fromstring(chart.svg('a < "b"', "& c", groups))


def test_a_figure_for_each_kind_and_number_of_heads(tmp_path):
    written = [*chart.draw(anchor_run(), tmp_path)]
    assert {path.name for path in written} == {
        *(f"gdn-fwd-{heads}.svg" for heads in ("2x8", "16x32", "16x64")),
        *(f"gdn-bwd-{heads}.svg" for heads in ("16x32", "4x8")),
    }
    for path in written:
        assert "FlashQLA" in ElementTree.parse(path).getroot().find("{*}desc").text
