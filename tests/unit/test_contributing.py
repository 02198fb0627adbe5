"""The table of user cases in CONTRIBUTING names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_every_user_case_has_a_row_with_a_test_or_words():
    rows = re.findall(r"^\| ([A-P]\d) [^|]*\| ([^|]+) \|$", TEXT, re.M)
    assert len(rows) == len(dict(rows)) == 54
    assert all(len(held) > 10 for _, held in rows)


def test_every_named_test_exists():
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 100
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.M), (file, name)
