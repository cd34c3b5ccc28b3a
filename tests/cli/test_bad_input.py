"""What a command meets in a bad world: a message, a hint, an exit code; never a traceback, never a doubtful answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import ckptstore.cli
from ckptstore import errors
from ckptstore.cli.exits import MEANINGS, Exit, exit_for
from ckptstore.errors import CkptStoreError
from ckptstore.objectstore import urls
from ckptstore.protocol.attempt import begin
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.commit import commit
from ckptstore.testing import simulated
from ckptstore.testing.faults import Fault, FaultyStore
from ckptstore.testing.tapped import TappedStore

LOOKING = ["ls", "latest", "log", "show", "tree", "verify"]


@pytest.mark.parametrize("command", LOOKING)
@pytest.mark.parametrize(
    "url", ["nope://x", "s3:/bucket", "file://relative", "s3://", "memory://", "", "a//b", "/a/../b"]
)
def test_a_url_that_names_no_run_is_bad_input(ckptstore, command, url):
    ended = ckptstore(command, url)
    assert (ended.code, ended.out) == (2, "")
    ended = ckptstore(command, url, "--json")
    assert (ended.code, ended.json["error"], ended.err) == (2, "invalid_input", "")
    assert ended.json["hint"]


@pytest.mark.parametrize("command", LOOKING)
def test_a_file_is_no_run(ckptstore, tmp_path, command):
    (tmp_path / "file").write_text("hello")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        ended = ckptstore(command, path, "--json")
        assert (ended.code, ended.json["error"]) == (2, "invalid_input")
        assert str(tmp_path) in ended.json["message"]


def test_credentials_in_a_url_are_never_printed(ckptstore):
    for url in ("s3://AKIAKEY:hunter2@bucket/run", "s3://hunter2@bucket"):
        for more in ([], ["--json"]):
            ended = ckptstore("ls", url, *more)
            assert ended.code == 2
            assert "hunter2" not in ended.out + ended.err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["lss", "{url}"], "'ls'"),
        (["verfy", "{url}"], "'verify'"),
        (["ls", "{url}", "--engine", "lokal"], "local"),
        (["ls", "s3://bucket/run", "-o", "endpont_url=http://x"], "endpoint_url"),
        (["verify", "{url}", "--level", "ful"], "full"),
        (["doctor", "{url}", "--for", "trainr"], "trainer"),
        (["doctor", "{url}", "--policy", "colector"], "collector"),
        (["show", "{url}", "step-12"], "step-120"),
        (["pin", "{url}", "stp-120", "--holder", "me"], "step-120"),
    ],
)
def test_what_was_mistyped_is_told_with_what_is_near(ckptstore, run, arguments, meant):
    run.save("step-120")
    run.save("best")
    ended = ckptstore(*(each.format(url=run.url) for each in arguments))
    assert ended.code in (Exit.INPUT, Exit.ABSENT)
    assert f"Did you mean {meant}" in ended.err


@pytest.mark.parametrize("command", LOOKING)
def test_a_run_of_a_later_release_is_refused(ckptstore, run, command):
    body = json.loads(run.store.get("run.json", max_bytes=1 << 16))
    run.store.put("run.json", json.dumps({**body, "format": 2}).encode())
    ended = ckptstore(command, run.url, "--json")
    assert (ended.code, ended.json["error"]) == (6, "unsupported")
    assert "pip install" in ended.json["hint"]


@pytest.mark.parametrize("foreign", [{"kind": "MERGE"}, {"kind": "COMMIT", "format": 2}])
def test_a_record_of_a_later_release_stops_answers_and_the_log_shows_those_before(ckptstore, run, foreign):
    run.save("a")
    run.append_foreign(**foreign)
    for command in ("ls", "latest", "show", "verify", "tree"):
        ended = ckptstore(command, run.url, "--json")
        assert (ended.code, ended.json["error"]) == (6, "unsupported")
        assert ended.json["facts"]["kind"] == foreign["kind"]
    for command in (["pin", "--holder", "x"], ["rollback", "--yes"]):
        ended = ckptstore(command[0], run.url, "a@1", *command[1:], "--json")
        assert (ended.code, ended.json["error"]) == (6, "unsupported")
    ended = ckptstore("log", run.url)
    assert (ended.code, [line.split()[0] for line in ended.lines]) == (6, ["SEQ", "0", "1"])
    assert "pip install" in ended.err
    document = ckptstore("log", run.url, "--json").json
    assert (document["error"], len(document["records"]), document["run"]) == ("unsupported", 2, run.log.run)


def test_an_optional_record_of_a_later_release_is_passed_over_and_shown(ckptstore, run):
    run.save("a")
    run.append_foreign(kind="AUDIT", optional=True, text="hello", format=9)
    assert ckptstore("latest", run.url).out == "a@1\n"
    assert ckptstore("verify", run.url, "--level", "full").code == 0
    ended = ckptstore("log", run.url)
    assert (ended.code, ended.err) == (0, "")
    assert "AUDIT" in ended.lines[-1]
    assert ckptstore("log", run.url, "--json").json["records"][-1]["record"]["text"] == "hello"


ODD = ["a/b", "*", "?", "[0]", "#", "100%", "%2F", "two words", "ñandú", "..", "~", "a@b", "-", "日本", "new\nline"]


@pytest.mark.parametrize("name", ODD)
def test_a_name_of_odd_characters_is_taken_literally(ckptstore, run, name):
    run.save("other")
    run.save(name)
    run.save("another")
    ended = ckptstore("show", run.url, "--json", "--", name)
    assert (ended.code, ended.json["checkpoint"]["checkpoint_id"]) == (0, name)
    assert ckptstore("pin", run.url, "--holder", "x", "--", f"{name}@2").code == 0
    assert [each["checkpoint_id"] for each in ckptstore("ls", run.url, "--json").json["committed"]] == [
        "another",
        name,
        "other",
    ]
    assert len(ckptstore("ls", run.url).lines) == 8


@pytest.mark.parametrize("root", ["run[lr=1e-4]", "p%20q", "a b", "ñ", "run*"])
def test_a_root_of_odd_characters_is_taken_literally(ckptstore, tmp_path, run, root):
    run.save("a")
    Path(run.url).rename(tmp_path / root)
    assert ckptstore("latest", tmp_path / root).out == "a@1\n"


@pytest.mark.parametrize("name", ["x" * 600, "ñ" * 100, "", "a@" + "1" * 5000, "a\udcffb"])
def test_a_name_that_no_checkpoint_can_have_is_bad_input(ckptstore, run, name):
    run.save("a")
    ended = ckptstore("show", run.url, name, "--json")
    assert (ended.code, ended.json["error"]) == (2, "invalid_input")
    assert ckptstore("show", run.url, name).code == 2


ESCAPES = "\x1b[31mred\x1b]0;title\x07 [bold]b[/bold] :smile: \u202eabc\r\x9b2J"


def test_text_from_a_store_cannot_drive_a_terminal(ckptstore, run):
    run.job = Incarnation.new(job=ESCAPES, host=ESCAPES)
    run.save_described("plain", tags=[ESCAPES], fingerprints={ESCAPES: ESCAPES}, training_state={ESCAPES: ESCAPES})
    run.save("\x1b[2J[red]x")
    run.catalog.pin(1, holder=ESCAPES, reason=ESCAPES)
    run.abandon("\x1b[5mhalf")
    for command in ("ls --all", "ls", "log", "show", "show plain", "tree", "verify --all", "latest"):
        first, *more = command.split()
        for text in (ckptstore(first, run.url, *more), ckptstore(first, run.url, *more, "--json")):
            assert text.code == 0
            assert all(each.isprintable() for line in text.out.split("\n") for each in line)
    assert "[bold]b[/bold] :smile:" in ckptstore("show", run.url, "plain").out
    assert "\\x1b[31mred" in ckptstore("ls", run.url).out
    ended = ckptstore("show", run.url, "\x1b[31mnobody")
    assert "\x1b" not in ended.err


@pytest.mark.parametrize(("fault", "code"), [(Fault.REFUSED, "unavailable"), (Fault.DENIED, "access_denied")])
@pytest.mark.parametrize("command", LOOKING)
def test_a_store_that_does_not_answer_is_no_empty_run(ckptstore, monkeypatch, command, fault, code):
    def plan(call):
        return fault if call.operation in ("get", "list", "head", "get_range") else None

    store = FaultyStore(urls.open_store("memory://behind"), plan)
    monkeypatch.setitem(urls._memory, "in-front", store)
    ended = ckptstore(command, "memory://in-front", "--json")
    assert (ended.code, ended.json["error"]) == (4, code)


def test_an_interrupt_of_a_command_that_only_looks_says_so(ckptstore, run, monkeypatch):
    run.save("a")

    def interrupted(call, act):
        if call.key.startswith("data/"):
            raise KeyboardInterrupt
        return act()

    monkeypatch.setitem(urls._memory, "interrupted", TappedStore(run.store, interrupted))
    ended = ckptstore("ls", "memory://interrupted")
    assert (ended.code, ended.out) == (130, "")
    assert "Nothing was appended" in ended.err


def test_what_is_committed_while_we_look_is_listed_once(ckptstore, run, monkeypatch):
    run.save("a")
    attempt = begin(run.log, run.job, checkpoint_id="b", world_size=1)
    shards = [simulated.upload(run.store, attempt, 0)]

    def commits_meanwhile(call, act):
        answer = act()
        if call.operation == "list" and call.key == "data/" and run.log.fold.committed_at(str(attempt.stem)) is None:
            answer = iter(list(answer))
            commit(run.log, run.job, attempt, shards)
        return answer

    monkeypatch.setitem(urls._memory, "busy", TappedStore(run.store, commits_meanwhile))
    found = ckptstore("ls", "memory://busy", "--json").json
    assert [each["checkpoint_id"] for each in found["committed"]] == ["b", "a"]
    assert found["uncommitted"] == []


def all_errors(kind=CkptStoreError):
    return [kind, *(each for below in kind.__subclasses__() for each in all_errors(below))]


def test_every_error_has_an_exit_code_and_the_table_says_what_it_means():
    for kind in all_errors():
        code = exit_for(kind("x"))
        assert code in MEANINGS
        assert (code is Exit.INTERNAL) == (kind is CkptStoreError)
    assert exit_for(errors.IntegrityError("x")) == exit_for(errors.UnsafePickleError("x")) == 1
    assert exit_for(errors.CommitUnknownError("x")) == 4
    assert exit_for(errors.FencedError("x")) == 5


README = (Path(ckptstore.cli.__file__).parent / "README.md").read_text()


def test_the_readme_has_the_table_of_exit_codes():
    rows = {int(code): (means, named) for code, means, named in re.findall(r"\| (\d+) \| (.+?) \|(.*)\|", README)}
    assert {code: means for code, (means, _) in rows.items()} == {code.value: said for code, said in MEANINGS.items()}
    for kind in all_errors()[1:]:
        assert f"`{kind.code}`" in rows[exit_for(kind("x")).value][1]


def keys_of(value):
    if isinstance(value, dict):
        return set(value).union(*(keys_of(inner) for inner in value.values()))
    return set().union(*(keys_of(inner) for inner in value)) if isinstance(value, list) else set()


def test_every_key_of_every_document_stands_in_the_readme(ckptstore, run):
    run.abandon("dead")
    run.save("a")
    run.save("b")
    run.append_foreign(kind="PIN", target=77, holder="x", reason="")
    run.flip(run.catalog.find("a").commit.stem.shard_key(0), 40)
    commands = (
        "ls|latest|show --keys|tree|verify --all --level full|pin b --holder x|unpin b --holder x|rollback a --yes"
    )
    found = set()
    for command in commands.split("|"):
        first, *more = command.split()
        document = ckptstore(first, run.url, *more, "--json").json
        document.get("checkpoint", {}).pop("metrics", None)
        for each in document.get("committed", []):
            each.pop("metrics")
        found |= keys_of(document)
    found |= set(ckptstore("log", run.url, "--json").json["records"][0])
    found |= set(ckptstore("show", run.url, "nobody", "--json").json)
    assert {key for key in found if f"`{key}`" not in README} == set()


@pytest.mark.parametrize("command", [*LOOKING, "pin", "unpin", "rollback"])
def test_the_help_of_every_command_says_the_exit_codes_and_needs_no_run(ckptstore, command):
    ended = ckptstore(command, "--help")
    assert ended.code == 0
    for code, meaning in MEANINGS.items():
        assert re.search(rf"^ +{code.value}  {re.escape(meaning)}$", ended.out, re.MULTILINE)
    assert "--json" in ended.out
    assert re.search(r"Usage: ckptstore \w+ \[OPTIONS\] \{?URL", ended.out)


@pytest.mark.parametrize("arguments", [["frob"], ["ls"], ["ls", "a", "b"], ["ls", "--frob", "a"], ["--frob"]])
def test_bad_usage_exits_with_2_and_says_where_the_help_is(ckptstore, arguments):
    ended = ckptstore(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "--help" in ended.err
    ended = ckptstore(*arguments, "--json")
    assert (ended.code, ended.json["error"]) == (2, "usage")


def test_an_option_without_its_value_is_told_where_the_help_of_its_command_is(ckptstore):
    ended = ckptstore("gc", "a", "--json", "--apply")
    assert (ended.code, ended.json["hint"]) == (2, "Run `ckptstore gc --help`.")


def test_without_arguments_the_help_is_shown(ckptstore):
    assert ckptstore().out == ckptstore("--help").out
    assert "rollback" in ckptstore().out


def test_the_version_is_printed_with_the_format(ckptstore):
    assert re.fullmatch(r"ckptstore \d+\.\d+\.\d+ \(format 1\)\n", ckptstore("--version").out)


def test_a_fault_of_our_own_is_a_message_that_hides_foreign_text(ckptstore, monkeypatch):
    class Broken:
        url = "memory://broken"

        def __getattr__(self, name):
            raise RuntimeError("token=hunter2")

    monkeypatch.setitem(urls._memory, "broken", Broken())
    ended = ckptstore("ls", "memory://broken", "--json")
    assert (ended.code, ended.json["error"], ended.json["facts"]["type"]) == (7, "internal", "RuntimeError")
    assert "hunter2" not in ended.out


def test_the_list_of_commands_cuts_no_sentence_off(ckptstore):
    told = ckptstore("--help").out
    assert "  restore   Let a checkpoint" in told
    assert "..." not in told.partition("Commands:")[2]
