"""The table of what was done to each invariant says what is missing, and invents nothing."""

from benchmarks import __main__ as entry
from benchmarks import faults, results, simulate


def test_drawn_histories_are_counted_by_invariant_and_what_is_missing_is_said(tmp_path, capsys):
    little = ["--seeds", "3", "--processes", "1", "--histories-only", "--results", str(tmp_path)]
    assert entry.main(["simulate", *little]) == 0
    document = results.read("simulation", folder=tmp_path)
    rows = {row["invariant"]: row for row in document["rows"]}
    assert tuple(rows) == simulate.INVARIANTS
    assert rows["I1"]["seeds"] == document["about"]["seeds"] == 3
    assert rows["I1"]["states"] > 3
    assert {row["violations"] for row in rows.values()} == {0}
    assert entry.main(["faults", "--results", str(tmp_path)]) == 1  # for want of the model
    lines = (tmp_path / faults.REPORT).read_text().splitlines()
    assert "Bounded model: missing (`make model`)." in lines
    (first,) = [line for line in lines if line.startswith("| I1 |")]
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells == ["I1", f"{rows['I1']['states']:,}", "3", str(rows["I1"]["kills"]), "missing", "none", "0"]


def test_the_table_joins_what_the_model_says():
    model = {
        "written_at": "now",
        "commit": "abc",
        "about": {"states": 7, "states_with_something_to_break": {"I1": 5}, "not_modelled": {"I13": "no bits"}},
        "rows": [{"finds": "I1", "as_expected": True}, {"finds": "", "as_expected": True}],
    }
    lines = faults.report(None, model)
    assert "| I1 | missing | missing | missing | 5 | 1 of the model | missing |" in lines
    assert "| I2 | missing | missing | missing | missing | none | missing |" in lines
    assert "| I13 | missing | missing | missing | not modelled | none | missing |" in lines
    assert [line for line in lines if line.startswith("Drawn histories")] == [
        "Drawn histories: missing (`make simulate`)."
    ]
