"""BENCHMARKS.md holds what committed results render, nothing else."""

import json

import pytest

from hopper_sol.kernels.bench import report
from hopper_sol.kernels.bench.report import BEGIN, END, PAGE, RESULTS, load, main, render, updated


def test_committed_page_is_what_the_results_render():
    page = PAGE.read_text("utf-8")
    if list(RESULTS.glob("**/*.json")):
        assert updated(page, render(RESULTS)) == page
    else:  # nothing measured: nothing shown
        assert BEGIN not in page or page == updated(page, "")


@pytest.fixture
def results(tmp_path, bench, add_peer):
    """A folder with one result file, made by the bench itself."""

    def missing():
        raise ImportError("not here")

    add_peer("peer:none", missing)
    attention = ("sol_attention", "--case", "tiny", "--backend", "reference,peer:none")
    run = bench(*attention, "--commit", "abc123")
    folder = tmp_path / "results" / "cpu"
    folder.mkdir(parents=True)
    (folder / "attention.json").write_text(json.dumps(run.file))
    linear = bench("fp8_linear", "--case", "tiny", "--backend", "reference,triton")
    (folder / "linear.json").write_text(json.dumps(linear.file))
    page = tmp_path / "PAGE.md"
    page.write_text(f"# Before\n\n{BEGIN}\nold\n{END}\n\nAfter\n")
    return tmp_path


def arguments(folder, *more):
    return ["--results", str(folder / "results"), "--page", str(folder / "PAGE.md"), *more]


def test_page_is_rewritten_between_its_markers(results, capsys):
    page = results / "PAGE.md"
    assert main(arguments(results, "--check")) == 1
    assert "old" in page.read_text() and "PAGE.md is not what" in capsys.readouterr().err
    assert main(arguments(results)) == 0
    text = page.read_text()
    assert text.startswith(f"# Before\n\n{BEGIN}\n") and text.endswith(f"{END}\n\nAfter\n")
    assert "old" not in text
    assert main(arguments(results, "--check")) == 0
    assert main(arguments(results)) == 0 and page.read_text() == text


def test_rendered_tables(results):
    text = render(results / "results")
    content = json.loads((results / "results" / "cpu" / "attention.json").read_text())
    row = content["rows"][0]
    assert text.index("### cpu/attention.json") < text.index("### cpu/linear.json")
    assert f"    {content['command']}\n" in text and "commit abc123." in text
    assert "`sol_attention`, tiny, (1, 300, 2, 128), generator structured" in text
    assert f"union ratio of 2 {row['union_ratio_2']:.2f}" in text
    # Columns that are empty in the whole table are left out.
    assert "| backend | precision | tau | density | total ms | quartiles |" in text
    assert f"| {row['total_ms']:.4g} | {row['p25_ms']:.4g} - {row['p75_ms']:.4g} |" in text
    assert "No times for peer:none bf16: ImportError: not here" in text
    assert "| layer | backend | quantise | TB/s | GEMM |" in text and "| tiny | reference |" in text
    assert "No times for triton fp8 tiny: declined: needs a cuda device" in text


def test_a_file_with_no_times_has_no_table(results):
    path = results / "results" / "cpu" / "attention.json"
    content = json.loads(path.read_text())
    content["rows"] = content["rows"][1:]
    path.write_text(json.dumps(content))
    text = render(results / "results")
    part = text[: text.index("### cpu/linear.json")]
    assert "|" not in part and "No times for peer:none" in part


@pytest.mark.parametrize("page", ["no markers", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_page_without_markers(tmp_path, capsys, page):
    with pytest.raises(ValueError, match="the page needs one line"):
        updated(page, "")
    (tmp_path / "PAGE.md").write_text(page)
    (tmp_path / "results").mkdir()
    assert main(arguments(tmp_path)) == 2 and "the page needs" in capsys.readouterr().err
    assert (tmp_path / "PAGE.md").read_text() == page


def test_no_page(tmp_path, capsys):
    assert main(arguments(tmp_path)) == 2 and "PAGE.md" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[", "x.json: "),
        ("[]", "got schema_version None, need 1"),
        ('{"schema_version": 2}', "got schema_version 2, need 1"),
        (
            '{"schema_version": 1, "rows": [{"backend": "b", "case": "c", "parity_ok": false, '
            '"total_ms": 1.0}]}',
            "without parity",
        ),
    ],
)
def test_unusable_files(tmp_path, text, what):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=what):
        load(path)


def test_bench_has_a_report_subcommand(results):
    from hopper_sol.kernels.bench import cli

    assert cli.main(["report", *arguments(results, "--check")]) == 1
    assert report.main(arguments(results)) == 0
