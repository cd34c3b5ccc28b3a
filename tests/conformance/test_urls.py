"""What a URL means, and what it can never mean."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptstore.errors import InvalidInputError
from ckptstore.objectstore.urls import open_store

ODD_NAMES = ["run[lr=1e-4]", "a*", "q?x", "{x}", "step#5", "a b+c", "p%20q", "café", "~", "$HOME"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_root_is_taken_literally(tmp_path, name):
    (tmp_path / "axx").mkdir()  # what a glob `a*` would find
    store = open_store(tmp_path / name)
    store.put("log/a", b"x")
    assert (tmp_path / name / "log" / "a").read_bytes() == b"x"
    assert [info.key for info in open_store(f"file://{tmp_path}/{name}/").list("")] == ["log/a"]
    assert not list((tmp_path / "axx").iterdir())


def test_a_trailing_slash_changes_nothing(tmp_path):
    assert open_store(f"{tmp_path}/run/").url == open_store(f"file://{tmp_path}/run").url == f"file://{tmp_path}/run"


def test_a_relative_path_is_seen_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_store("runs/a").url == open_store(Path("runs/a")).url == f"file://{tmp_path}/runs/a"
    assert open_store("./runs").url == f"file://{tmp_path}/runs"
    assert open_store("../runs").url == f"file://{tmp_path.parent}/runs"
    assert open_store(".").url == f"file://{tmp_path}"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "gs:/bucket//run",
        "s3:/bucket/run",
        "s3://",
        "s3:///run",
        "s3://x/run",
        "file://relative",
        "memory://",
        "a//b",
        "a/../b",
        "a/./b",
        "a/..",
        "file:///a//b",
        "s3://bucket/a//b",
        "s3://bucket//",
        "s3://bucket/../other",
        "memory://a/./b",
        "a\nb",
        "a\x00b",
        "a\udcff",
        b"bytes",
    ],
)
def test_what_is_not_a_root_is_refused_at_once(url):
    with pytest.raises(InvalidInputError) as caught:
        open_store(url)
    assert caught.value.hint


def test_a_scheme_that_nobody_knows_is_refused():
    with pytest.raises(InvalidInputError, match="fsspec knows no hfds://"):
        open_store("hfds://host/run")


@pytest.mark.parametrize(("url", "instead"), [("gcs://bucket/run", "gs://"), ("s3a://bucket/run", "s3://")])
def test_a_run_has_one_name(url, instead):
    with pytest.raises(InvalidInputError, match=f"Write {instead}"):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAEXAMPLE:hush@bucket/run",
        "s3:/AKIAEXAMPLE:hush@bucket/run",
        "sftp://me:hush@host/a//b",
        "https://host/run?token=hush",
    ],
)
def test_credentials_in_a_url_that_is_refused_are_not_shown(url):
    with pytest.raises(InvalidInputError) as caught:
        open_store(url)
    assert "hush" not in str(caught.value) + repr(caught.value.facts)


@pytest.mark.parametrize(
    ("url", "instead"),
    [
        ("https://bucket.s3.amazonaws.com/runs/a/", "Write s3://bucket/runs/a."),
        ("https://my.bucket.s3.eu-west-1.amazonaws.com/runs/a", "Write s3://my.bucket/runs/a."),
        ("https://bucket.s3-us-west-2.amazonaws.com", "Write s3://bucket."),
        ("https://s3.eu-west-1.amazonaws.com/bucket/runs/a?X-Amz-Signature=hush", "Write s3://bucket/runs/a."),
        ("https://s3.amazonaws.com/", "Write s3://bucket/path/to/run."),
        ("https://storage.googleapis.com/bucket/runs/a", "Write gs://bucket/runs/a."),
        ("https://bucket.storage.googleapis.com/runs/a", "Write gs://bucket/runs/a."),
        ("https://storage.cloud.google.com/bucket/runs/a", "Write gs://bucket/runs/a."),
        (
            "HTTPS://Acme.blob.core.windows.net/box/a?sig=hush",
            "Write az://box/a with storage_options={'account_name': 'acme'}",
        ),
        ("http://minio:9000/bucket/runs/a", "s3://bucket/path/to/run and set AWS_ENDPOINT_URL=http://minio:9000 or"),
        ("http://me:hush@[::1]:9000/bucket", "AWS_ENDPOINT_URL=http://[::1]:9000 or"),
        ("https://", "AWS_ENDPOINT_URL=https://host:port or"),
        ("https://hush$@(x)", "AWS_ENDPOINT_URL=https://host:port or"),
    ],
)
@pytest.mark.parametrize("engine", [None, "fsspec"])
def test_the_address_of_a_server_is_no_store_and_the_right_url_is_told(url, instead, engine):
    with pytest.raises(InvalidInputError, match="address of a server") as caught:
        open_store(url, engine=engine)
    assert instead in caught.value.hint
    assert "hush" not in str(caught.value) + repr(caught.value.facts)


@pytest.mark.parametrize(
    ("url", "engine", "options", "near"),
    [
        ("s3://bucket/run", "obstor", {}, "Did you mean obstore?"),
        ("gs://bucket/run", "gcs", {}, "Did you mean gcsfs?"),
        ("s3://bucket/run", None, {"endpont_url": "x"}, "Did you mean endpoint_url"),
        ("s3://bucket/run", "s3fs", {"profle": "x"}, "Did you mean profile"),
        ("s3://bucket/run", None, {"config_kwargs": {"read_timout": 1}}, "Did you mean config_kwargs.read_timeout"),
        ("s3://bucket/run", None, {"scret": 1, "profle": "x"}, "Did you mean profile, secret?"),
        ("gs://bucket/run", "gcsfs", {"projct": "x"}, "Did you mean project"),
        ("gs://bucket/run", "obstore", {"endpoint": "x"}, "Did you mean endpoint_url"),
        ("az://box/run", None, {"acount_name": "x"}, "Did you mean account_name"),
        ("sfpt://host/run", None, {}, "Did you mean sftp"),
    ],
)
def test_what_was_mistyped_is_refused_with_what_was_meant(url, engine, options, near):
    with pytest.raises(InvalidInputError) as caught:
        open_store(url, engine=engine, storage_options=options)
    assert near in caught.value.message
    assert caught.value.hint


def test_where_nothing_is_near_nothing_is_guessed():
    with pytest.raises(InvalidInputError) as caught:
        open_store("s3://bucket/run", storage_options={"zzzz": 1})
    assert "mean" not in caught.value.message


def test_a_memory_store_is_one_per_name():
    open_store("memory://urls-one").put("a", b"1")
    assert open_store("memory://urls-one/").get("a", max_bytes=1) == b"1"
    assert list(open_store("memory://urls-two").list("")) == []


def test_an_engine_that_does_not_serve_the_scheme_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="served by: local, fsspec"):
        open_store(tmp_path, engine="obstore")


def test_options_that_nobody_knows_are_refused_by_name(tmp_path):
    with pytest.raises(InvalidInputError, match="colour"):
        open_store(tmp_path, storage_options={"colour": 1})


def test_opening_a_path_loads_no_cloud_client(tmp_path):
    code = (
        "import sys; from ckptstore.objectstore.urls import open_store; open_store(sys.argv[1]); open_store('memory://a');"
        "sys.exit(any(m.split('.')[0] in {'obstore', 'aiobotocore', 'botocore', 'torch'} for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60, env=dict(os.environ))
