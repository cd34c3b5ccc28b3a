"""What a file of metrics, rules or a report may replace, and what it may not."""

import os

import pytest

from ckptstore.errors import InvalidInputError
from ckptstore.wholefile import check_writable, file_at, write_whole


def test_where_a_link_stands_its_target_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "shared").mkdir()
    target, link = tmp_path / "shared" / "run.prom", tmp_path / "run.prom"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["run.prom", "run.prom", "shared"]


def test_a_link_to_a_file_that_is_not_there_yet_makes_it(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("made")
    write_whole(link, b"new")
    assert link.is_symlink()
    assert (tmp_path / "made").read_bytes() == b"new"


@pytest.mark.parametrize("write", [lambda path: write_whole(path, b"x"), check_writable, file_at])
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path, write):
    pipe, link, loop = tmp_path / "pipe", tmp_path / "link", tmp_path / "loop"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    loop.symlink_to(loop)
    (tmp_path / "folder").mkdir()
    for path in (pipe, link, tmp_path / "folder", loop, f"{tmp_path}/folder/new/"):
        with pytest.raises(InvalidInputError, match="cannot be written"):
            write(path)
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "link", "loop", "pipe"]


@pytest.mark.parametrize("path", ["", None, 5, b"bytes", "a\0b", "\ud800"])
def test_what_names_no_file_is_refused(path):
    with pytest.raises(InvalidInputError, match="must be named by a path"):
        write_whole(path, b"")


def test_what_is_inside_the_run_is_refused_also_through_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    root = f"file://{tmp_path}/run"
    for path in (tmp_path / "run" / "latest.json", tmp_path / "link" / "log" / "new", tmp_path / "run"):
        with pytest.raises(InvalidInputError, match=r"inside the run|no regular file"):
            check_writable(path, outside=root)
    check_writable(tmp_path / "run.prom", outside=root)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "run"]
