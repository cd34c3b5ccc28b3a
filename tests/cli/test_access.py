"""`--engine` and `--option` say how the store is reached, and may stand anywhere."""

import pytest

from ckptstore.cli import access
from ckptstore.cli.exits import Exit
from ckptstore.errors import InvalidInputError


@pytest.mark.parametrize(
    "arguments",
    [
        ["--engine", "none", "ls", "memory://x"],
        ["ls", "--engine", "none", "memory://x"],
        ["ls", "memory://x", "--engine=none"],
        ["ls", "memory://x", "--all", "--engine", "none", "--json"],
    ],
)
def test_the_engine_may_be_named_anywhere(ckptstore, arguments):
    answer = ckptstore(*arguments)
    assert answer.code == Exit.INPUT
    assert "The engine 'none' does not serve memory://." in answer.out + answer.err


def test_what_follows_two_dashes_is_no_option_of_the_store():
    assert access.moved_to_the_front(["ls", "-o", "a=1", "--", "--engine", "x"]) == [
        "-o",
        "a=1",
        "ls",
        "--",
        "--engine",
        "x",
    ]


def test_options_reach_inside_and_keep_their_text():
    access.keep(
        "s3fs",
        [
            "key=0123",
            "config_kwargs.read_timeout=5",
            "anon=true",
            "client_kwargs.verify=/ca.pem",
            "client_kwargs.region_name=x=y",
        ],
    )
    said = access.said()
    access.keep(None, [])
    assert said.engine == "s3fs"
    assert said.storage_options == {
        "key": "0123",
        "config_kwargs": {"read_timeout": 5.0},
        "anon": True,
        "client_kwargs": {"verify": "/ca.pem", "region_name": "x=y"},
    }


@pytest.mark.parametrize("options", [["secret"], ["=hush"], ["a=hush", "a=2"], ["a=hush", "a.b=2"], ["a..b=hush"]])
def test_an_option_that_makes_no_sense_is_refused_and_its_value_not_shown(options):
    with pytest.raises(InvalidInputError) as caught:
        access.keep(None, options)
    assert "hush" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_unknown_option_is_refused_by_name(ckptstore):
    answer = ckptstore("ls", "s3://bucket/run", "-o", "endpont_url=http://x", "--json")
    assert answer.code == Exit.INPUT
    assert "endpont_url" in answer.json["message"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["memory://hints"], "memory://hints"),
        (["memory://a b"], "'memory://a b'"),
        (["memory://it's; rm"], """'memory://it'"'"'s; rm'"""),
        (["memory://a`b"], "'memory://a`b'"),
        (["memory://URL"], "memory://URL"),
        (["memory://a URL b"], "'memory://a URL b'"),
        (["memory://a:b@c"], "memory://a:b@c"),
        (["--engine", "fsspec", "memory://x"], "memory://x --engine fsspec"),
        (["memory://x", "--engine=fsspec", "-o", "skip=true"], "memory://x --engine fsspec -o skip=..."),
    ],
)
def test_a_hint_names_the_run_that_was_named_ready_for_a_shell(ckptstore, given, shown):
    for command in (["show"], ["latest"]):
        told = ckptstore(*command, *given)
        assert told.code == Exit.BAD
        assert f"hint: Check the URL; see `ckptstore ls {shown} --all`." in told.err.splitlines()
    assert ckptstore("show", *given, "--json").json["hint"] == f"Check the URL; see `ckptstore ls {shown} --all`."


@pytest.mark.parametrize(
    ("url", "options", "shown"),
    [
        (
            "s3://bucket/a@1:b@2",
            ["endpoint_url=http://host:1", "profile=train"],
            "s3://bucket/a@1:b@2 -o endpoint_url=http://host:1 -o profile=train",
        ),
        (
            "s3://bucket/a",
            ["secret=hush", "client_kwargs.aws_session_token=hush"],
            "s3://bucket/a -o secret=... -o client_kwargs.aws_session_token=...",
        ),
        (
            "s3://bucket/a",
            ["endpoint_url=http://me:hush@host", "verify=/ca.pem"],
            "s3://bucket/a -o endpoint_url=... -o verify=/ca.pem",
        ),
        ("s3://bucket/a", ["endpoint_url=http://hush@host"], "s3://bucket/a -o endpoint_url=..."),
        ("sftp://me@host/run", [], "sftp://me@host/run"),
        ("sftp://me:hush@host/run", [], "URL"),
        ("sftp://me:hush@ho@st/run", [], "URL"),
        ("odd://host/run?token=hush", [], "URL"),
        ("s3://me:hush@bucket/run", [], "URL"),
        ("s3:/me:hush@bucket/run", [], "URL"),
        ("/runs/a:b@c", [], "/runs/a:b@c"),
        ("-run", [], "./-run"),
    ],
)
def test_a_hint_repeats_no_secret(url, options, shown):
    access.keep(None, options)
    access.keep_url(url)
    hint = access.pointed("Check the URL: `ckptstore log URL`, `ckptstore verify URL --all`, `other URL`.")
    access.keep(None, [])
    assert hint == f"Check the URL: `ckptstore log {shown}`, `ckptstore verify {shown} --all`, `other URL`."


def test_what_one_command_was_about_is_no_other_s_hint(ckptstore):
    ckptstore("show", "memory://first")
    assert "first" not in ckptstore("nonsense").err
    assert access.said().url is None


def test_no_hint_of_any_command_says_url_where_it_is_known(ckptstore, run):
    run.save("a")
    run.abandon("b")
    for arguments in (["show", "b"], ["show", "zz"], ["show", "zz@7"], ["restore", "b"], ["rollback", "b"]):
        command, name = arguments
        told = ckptstore(command, run.url, name)
        assert told.code == Exit.ABSENT
        assert f" {run.url}" in told.err
        assert " URL" not in told.err
    run.flip("log/000000000001.json", 30)
    for command in ("ls", "show", "latest", "log", "verify"):
        told = ckptstore(command, run.url)
        assert told.code == Exit.BAD
        assert f"`ckptstore verify {run.url}" in told.err or f"`ckptstore log {run.url}" in told.err
        assert " URL" not in told.err
