"""The report: the same files from the same results, and a check that notices when they are not."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ElementTree

import pytest

from bench import report
from bench.harness.plots import Point, roofline


def row(op, variant, seconds, ratio=None, **changes):
    given = {
        "bench": "attention",
        "op": op,
        "case": {"context": 4096, "dtype": "bf16"},
        "variant": variant,
        "seconds": seconds,
        "ci": [0.9 * seconds, 1.05 * seconds],
        "bytes": 1_000_000,
        "flops": 4_000_000,
        "roof": "memory",
        "ceiling": "read",
        "share_of_roof": 0.001 / seconds,
        "ratio": ratio or {},
    }
    return {**given, **changes}


def mixed(part, seconds):
    return row("paged_attention", "cpu", seconds, case={"decode_share": 20, "part": part})


RESULTS = {
    "bench": "attention",
    "machine": {
        "device": "cpu",
        "name": "A processor",
        "cores": 2,
        "threads": 2,
        "isa": "amx",
        "libraries": {"torch": "2.13"},
    },
    "commit": "0123abc",
    "command": "python -m bench.attention",
    "date": "2026-12-01T00:00:00+00:00",
    "ceilings": {
        "read": {"value": 30.0, "unit": "GB/s", "form": "loop", "forms": {"loop": 30.0}},
        "bf16": {"value": 6.5, "unit": "TFLOP/s", "form": "loop", "forms": {"loop": 6.5}},
    },
    "rows": [
        row("paged_attention", "cpu", 0.002, {"sdpa": 4.0}),
        row("paged_attention", "sdpa", 0.008),
        row("paged_attention", "cpu", 0.004, {"sdpa": 0.25}, case={"context": 128, "dtype": "bf16"}),
        row("paged_attention", "sdpa", 0.001, case={"context": 128, "dtype": "bf16"}),
        mixed("mixed", 0.009),
        mixed("decode", 0.004),
        mixed("prefill", 0.006),
    ],
}
README = f"# Title\n\nBefore.\n\n{report.BEGIN}\noutdated\n{report.END}\n\nAfter.\n"


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "results" / "a-processor"
    folder.mkdir(parents=True)
    (folder / "attention.json").write_text(json.dumps(RESULTS))
    (tmp_path / "README.md").write_text(README)
    return tmp_path


def files_of(root):
    return {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_the_report_is_the_same_each_time_and_check_agrees_with_it(root, capsys):
    assert report.main(["--check"], root) == 1
    assert "results/README.md is not what the results give: run python -m bench.report" in capsys.readouterr().err
    assert report.main([], root) == 0
    first = files_of(root)
    assert {str(path) for path in first} == {
        "README.md",
        "results/README.md",
        "results/a-processor/attention.json",
        "results/a-processor/roofline.svg",
    }
    assert report.main(["--check"], root) == 0
    assert report.main([], root) == 0
    assert files_of(root) == first


@pytest.mark.parametrize("name", ["README.md", "results/README.md", "results/a-processor/roofline.svg"])
def test_check_names_the_file_that_was_edited_by_hand(root, capsys, name):
    report.main([], root)
    path = root / name
    path.write_text(path.read_text().replace("4096" if name.endswith("svg") else "4.00", "9.99"))
    assert report.main(["--check"], root) == 1
    assert f"error: {name} is not what" in capsys.readouterr().err


def test_check_notices_new_results(root):
    report.main([], root)
    changed = copy.deepcopy(RESULTS)
    changed["rows"][0]["seconds"] = 0.0019
    (root / "results/a-processor/attention.json").write_text(json.dumps(changed))
    assert report.main(["--check"], root) == 1


def test_the_readme_changes_between_its_markers_alone(root):
    report.main([], root)
    text = (root / "README.md").read_text()
    assert text.startswith("# Title\n\nBefore.\n\n" + report.BEGIN)
    assert text.endswith(report.END + "\n\nAfter.\n")
    assert "outdated" not in text
    # Least, geometric mean and most of the ratios: the loss is there.
    assert "| a-processor | attention | paged_attention | cpu | 5 |" in text
    assert "sdpa 0.25 / 1.00 / 4.00" in text


def test_a_readme_without_markers_is_left_alone_and_one_marker_is_an_error(root, capsys):
    (root / "README.md").write_text("nothing here\n")
    assert report.main([], root) == 0
    assert (root / "README.md").read_text() == "nothing here\n"
    (root / "README.md").write_text(report.BEGIN)
    assert report.main([], root) == 1
    assert "should have both or neither" in capsys.readouterr().err


def test_every_row_of_ours_is_in_the_tables_with_its_peers(root):
    report.main([], root)
    text = (root / "results/README.md").read_text()
    numbers = "2 ms | 8 % ~ | 1 MB | 4 MFLOP | 500 MB/s | 50 % read | 4.00"
    assert f"| paged_attention: context 4096, dtype bf16 | cpu | {numbers} |" in text
    assert "| paged_attention: context 128, dtype bf16 | cpu | 4 ms |" in text
    assert "`python -m bench.attention` at 0123abc, 2026-12-01T00:00:00+00:00" in text
    assert "On A processor, amx, 2 cores, 2 threads, torch 2.13." in text
    assert "read 30 GB/s (loop); bf16 6.5 TFLOP/s (loop)" in text


def test_the_interference_factor_is_the_mixed_step_over_its_parts(root):
    report.main([], root)
    assert "| decode_share 20 | cpu | 4 ms | 6 ms | 9 ms | 0.90 |" in (root / "results/README.md").read_text()


def test_without_results_the_report_says_so(tmp_path):
    (tmp_path / "results").mkdir()
    assert report.main([], tmp_path) == 0
    assert "Nothing has been measured yet." in (tmp_path / "results/README.md").read_text()


def damaged(change):
    content = copy.deepcopy(RESULTS)
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "there is no machine, commit"),
        (damaged(lambda c: c.pop("ceilings")), "there is no ceilings"),
        (damaged(lambda c: c["rows"][1].pop("ci")), "row 1 has no ci"),
        (
            damaged(lambda c: c["rows"][0].update(roof="read")),
            "row 0 has the roof 'read'; it should be memory or compute",
        ),
        (damaged(lambda c: c["rows"][2].update(seconds=9)), "row 2 has 9 s, outside its interval"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(root, capsys, text, complaint):
    path = root / "results/a-processor/attention.json"
    path.write_text(text)
    assert report.main([], root) == 1
    error = capsys.readouterr().err
    assert complaint in error
    assert "attention.json" in error


@pytest.mark.parametrize("name", report.OTHERS)
def test_files_that_hold_no_times_are_passed_over(root, name):
    (root / f"results/a-processor/{name}.json").write_text('{"rows": []}')
    assert report.main([], root) == 0


# --- plots ---


def test_points_lie_under_the_roof_where_their_share_says():
    """A row at the bandwidth is on the slope and one at the peak on the flat part; half of it lies lower."""
    points = [
        Point(1.0, 1e10, "a", "on the slope"),
        Point(1000.0, 1e12, "b", "at the peak"),
        Point(1.0, 5e9, "a", "half"),
    ]
    tree = ElementTree.fromstring(roofline("t", points, 1e10, {"bf16": 1e12}))
    space = "{http://www.w3.org/2000/svg}"
    dots = {
        dot.find(space + "title").text: dot.attrib
        for dot in tree.iter(space + "circle")
        if dot.find(space + "title") is not None
    }
    place = {name: (float(dot["cx"]), float(dot["cy"])) for name, dot in dots.items()}
    slope, flat = [line.attrib for line in tree.iter(space + "line") if line.get("stroke-width") == "1.5"]
    x1, y1, x2, y2 = (float(slope[key]) for key in ("x1", "y1", "x2", "y2"))
    x, y = place["on the slope"]
    assert y == pytest.approx(y1 + (x - x1) / (x2 - x1) * (y2 - y1), abs=0.2)
    assert place["at the peak"][1] == pytest.approx(float(flat["y1"]), abs=0.1)
    assert place["half"][0] == x
    assert place["half"][1] > y
    assert dots["on the slope"]["fill"] == dots["half"]["fill"] != dots["at the peak"]["fill"]


def test_titles_are_escaped():
    drawn = roofline("a < b & c", [Point(1.0, 1e9, "op", "x < y")], 1e9, {"bf16": 1e10})
    assert ElementTree.fromstring(drawn) is not None
    assert "a &lt; b &amp; c" in drawn


def test_what_no_gpu_has_measured_is_said():
    def results(*variants):
        return {"device": {"layers": {"rows": [{"variant": variant} for variant in variants]}}}

    assert report.unmeasured(results("cpu")).startswith("Not measured: triton and cuda, for want of a GPU.")
    assert report.unmeasured(results("cpu", "triton")).startswith("Not measured: cuda, ")
    assert report.unmeasured(results("triton", "cuda")) == ""
