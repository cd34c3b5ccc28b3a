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
