"""What the documents say of the project is there."""

import re
from pathlib import Path

import pytest

import ckptstore

ROOT = Path(__file__).parents[2]
DOCUMENTS = [path for path in sorted(ROOT.rglob("*.md")) if not {".venv", ".git"} & set(path.relative_to(ROOT).parts)]
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(document):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_target_that_is_named_exists(document):
    targets = set(re.findall(r"`make ([a-z]+)", document.read_text()))
    assert {target for target in targets if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)} == set()


def test_every_test_that_the_evidence_names_exists():
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", (ROOT / "EVIDENCE.md").read_text())
    assert named
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).exists() or (test and not re.search(rf"(def|class) {test}\b", (ROOT / path).read_text()))
    ]
    assert missing == []


def test_one_version_is_stated_once_and_again():
    assert f'version = "{ckptstore.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"## {ckptstore.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_no_module_is_longer_than_a_reader_wants():
    modules = [
        path for folder in ("ckptstore", "storage_writers", "localstack") for path in (ROOT / folder).rglob("*.py")
    ]
    assert [str(path.relative_to(ROOT)) for path in modules if len(path.read_text().splitlines()) > 420] == []
