"""`verify`."""

from __future__ import annotations

import pytest

from ckptstore.format.layout import slot_key

LEVELS = ["chain", "exists", "etag", "full"]


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_whole_is_fine_at_every_level(ckptstore, run, level):
    run.save("a")
    ended = ckptstore("verify", run.url, "--level", level)
    assert (ended.code, ended.err) == (0, "")
    assert "the log" in ended.lines[0]
    assert ended.out.count("ok") == (1 if level == "chain" else 2)
    found = ckptstore("verify", run.url, "--level", level, "--json").json
    assert (found["level"], found["ok"], found["log"]) == (level, True, {"ok": True, "findings": []})
    assert found["checkpoints"] == ([] if level == "chain" else [found["checkpoints"][0]])


def test_the_latest_is_verified_unless_another_is_named_or_all_are_asked_for(ckptstore, run):
    for name in "abc":
        run.save(name)
    run.catalog.rollback(2)

    def verified(*more):
        return [each["seq"] for each in ckptstore("verify", run.url, "--json", *more).json["checkpoints"]]

    assert verified() == [2]
    assert verified("a") == [1]
    assert verified("c@3") == [3]
    assert verified("--all") == [3, 2, 1]
    assert ckptstore("verify", run.url, "--all").out.count("ok") == 4


def test_a_flipped_bit_is_found_at_level_full_and_the_object_is_named(ckptstore, run):  # I13
    key = run.save("a").commit.stem.shard_key(2)
    for position in (0, 20, run.store.head(key).size - 1):
        run.flip(key, position)
        assert ckptstore("verify", run.url).code == 0
        ended = ckptstore("verify", run.url, "--level", "full")
        assert ended.code == 1
        assert "DAMAGED  a@1" in ended.out
        assert key in ended.out
        found = ckptstore("verify", run.url, "--level", "full", "--json")
        assert (found.code, found.json["ok"], found.json["log"]["ok"]) == (1, False, True)
        (finding,) = found.json["checkpoints"][0]["findings"]
        assert (finding["level"], finding["kind"], finding["key"]) == ("full", "damaged", key)
        run.flip(key, position)
    assert ckptstore("verify", run.url, "--level", "full").code == 0


@pytest.mark.parametrize("level", LEVELS[1:])
def test_missing_cut_and_longer_shards_are_found_by_their_sizes(ckptstore, run, level):  # I4
    stem = run.save("a").commit.stem
    keys = [stem.shard_key(rank) for rank in range(3)]
    body = run.store.get(keys[1], max_bytes=1 << 20)
    run.store.delete(keys[0])
    run.store.put(keys[1], body[:-1])
    run.store.put(keys[2], body + b"x")
    ended = ckptstore("verify", run.url, "--level", level, "--json")
    found = [(each["kind"], each["key"]) for each in ended.json["checkpoints"][0]["findings"]]
    assert (ended.code, found) == (1, [("missing", keys[0]), ("size", keys[1]), ("size", keys[2])])


def test_swapped_shards_are_found(ckptstore, run):
    stem = run.save("a").commit.stem
    one, two = (run.store.get(stem.shard_key(rank), max_bytes=1 << 20) for rank in (0, 1))
    run.store.put(stem.shard_key(0), two)
    run.store.put(stem.shard_key(1), one)
    found = ckptstore("verify", run.url, "--level", "full", "--json").json["checkpoints"][0]["findings"]
    assert {each["key"] for each in found} == {stem.shard_key(0), stem.shard_key(1)}


def test_a_damaged_or_missing_part_is_found(ckptstore, run):
    part = run.save("a").commit.parts[0].path
    run.flip(part, 12)
    ended = ckptstore("verify", run.url, "--json")
    assert [(each["kind"], each["key"]) for each in ended.json["checkpoints"][0]["findings"]] == [("damaged", part)]
    run.store.delete(part)
    ended = ckptstore("verify", run.url, "--json")
    assert [(each["kind"], each["key"]) for each in ended.json["checkpoints"][0]["findings"]] == [("missing", part)]
    assert ended.code == 1


def test_what_the_store_calls_other_bytes_is_rewritten_and_level_full_decides(ckptstore, make_run, tmp_path):  # I13
    run = make_run(f"memory://{tmp_path.name}")  # its ETags are hashes
    key = run.save("a").commit.stem.shard_key(0)
    run.flip(key, 20)
    ended = ckptstore("verify", run.url, "--level", "etag")
    assert (ended.code, "REWRITTEN a@1" in ended.out, "DAMAGED" in ended.out) == (1, True, False)
    ended = ckptstore("verify", run.url, "--level", "full")
    assert (ended.code, "DAMAGED  a@1" in ended.out) == (1, True)
    run.flip(key, 20)
    assert ckptstore("verify", run.url, "--level", "etag").code == 0


@pytest.mark.parametrize("more", [["a@1"], ["--all"], ["--level", "chain"]], ids=" ".join)
@pytest.mark.parametrize("level", LEVELS)
def test_a_log_that_a_newer_version_wrote_to_is_never_called_fine(ckptstore, run, level, more):
    run.save("a")
    run.append_foreign(kind="MERGE", format=2)
    ended = ckptstore("verify", run.url, "--level", level, *more, "--json")
    assert (ended.code, ended.json["error"]) == (6, "unsupported")


def test_one_damaged_checkpoint_of_many_is_the_only_one_called_so(ckptstore, run):
    for name in "abc":
        run.save(name)
    run.flip(run.catalog.find("b").commit.stem.shard_key(1), 50)
    ended = ckptstore("verify", run.url, "--all", "--level", "full")
    assert ended.code == 1
    assert [line.split()[:2] for line in ended.lines if "level full" in line] == [
        ["ok", "c@3:"],
        ["DAMAGED", "b@2:"],
        ["ok", "a@1:"],
    ]


@pytest.mark.parametrize("spoil", ["altered", "cut", "empty", "missing", "swapped", "foreign"])
def test_a_damaged_record_is_named_with_what_to_do_and_the_log_shows_those_before(ckptstore, run, spoil):
    for name in "abc":
        run.save(name)
    key = slot_key(2)
    body = run.store.get(key, max_bytes=1 << 16)
    if spoil == "missing":
        run.store.delete(key)
    elif spoil == "altered":
        run.flip(key, 200)
    else:
        other = {"cut": body[:-9], "empty": b"", "swapped": run.store.get(slot_key(1), max_bytes=1 << 16)}
        run.store.put(key, other.get(spoil, b"not ours\n"))
    for command in ("ls", "latest", "show", "verify", "tree"):
        ended = ckptstore(command, run.url, "--json")
        assert (ended.code, ended.json["error"]) == (1, "integrity")
        assert key in ended.json["message"]
        assert ended.json["facts"]["key"] == key
    assert "Restore" in ckptstore("verify", run.url).err
    ended = ckptstore("log", run.url)
    assert (ended.code, [line.split()[0] for line in ended.lines]) == (1, ["SEQ", "0", "1"])
    assert key in ended.err
    document = ckptstore("log", run.url, "--json").json
    assert (document["error"], [each["seq"] for each in document["records"]]) == ("integrity", [0, 1])


def test_a_log_without_its_run_file_is_damage_and_no_new_run(ckptstore, run):
    run.save("a")
    run.store.delete("run.json")
    for command in ("ls", "latest", "log", "verify"):
        ended = ckptstore(command, run.url)
        assert ended.code == 1
        assert "run.json" in ended.err


def test_a_run_file_that_was_altered_is_found(ckptstore, run):
    run.save("a")
    body = run.store.get("run.json", max_bytes=1 << 16)
    run.store.put("run.json", body.replace(b"20", b"21", 1))
    assert ckptstore("verify", run.url, "--level", "chain").code == 1


@pytest.mark.parametrize("more", [["--level", "chain"], ["--level", "chain", "--all"]])
def test_a_log_without_commits_can_be_verified(ckptstore, run, more):
    run.abandon("a")
    assert ckptstore("verify", run.url, *more).code == 0
    assert ckptstore("verify", run.url, "--all").code == 1


@pytest.mark.parametrize("more", [["--level", "deep"], ["a", "--all"]])
def test_what_makes_no_sense_is_refused(ckptstore, run, more):
    run.save("a")
    ended = ckptstore("verify", run.url, *more, "--json")
    assert (ended.code, ended.json["error"]) == (2, "invalid_input")
