"""A run's name is taken literally by every engine, and no other run is touched or seen under it."""

import secrets
from dataclasses import replace

from places import EVERY, on
from refusals import command, state, target, told
from states import same

import storage_writers as sw
from ckptstore.errors import InvalidInputError

NEIGHBOURS = {
    "run[1]": "run1",
    "a*": "abc",
    "q?x": "qax",
    "{x}": "x",
    "step#5": "step",
    "a b+c": "a b c",
    "p%20q": "p q",
    "café": "cafe\u0301",
}
"""Names, and what each would be taken for by who expands patterns, decodes or normalises."""


def check_round_trip(place, step):
    saved = state() | {"step": step}
    sw.save(saved, checkpoint_id=f"step-{step}", storage_writer=place.probed().writer())
    found = target()
    sw.load(found, storage_reader=place.reader())
    assert same(found, saved)
    code, listed = command("ls", place.url, *place.arguments)
    assert (code, [each["checkpoint_id"] for each in listed["committed"]]) == (0, [f"step-{step}"])
    code, verified = command("verify", place.url, "--all", "--level", "full", *place.arguments)
    assert (code, verified["ok"], len(verified["checkpoints"])) == (0, True, 1)


@on(*EVERY)
def test_a_runs_name_is_taken_literally_and_its_neighbours_stay(place):
    neighbours = {name: place.below(name).probed() for name in NEIGHBOURS.values()}
    for neighbour in neighbours.values():
        sw.save(state(), checkpoint_id="neighbour", storage_writer=neighbour.writer())
    before = {name: neighbour.contents() for name, neighbour in neighbours.items()}
    for step, name in enumerate(NEIGHBOURS):
        check_round_trip(place.below(name), step)
    assert {name: neighbour.contents() for name, neighbour in neighbours.items()} == before
    if place.url.startswith("memory://") and place.engine is None:
        return  # there each name is a store of its own, and none lies in another
    assert {info.key.split("/")[0] for info in place.store().list("")} == {*NEIGHBOURS, *neighbours}


@on(*EVERY)
def test_a_slash_at_the_end_changes_nothing_and_two_in_the_middle_are_refused_before_a_byte_is_sent(place):
    check_round_trip(replace(place, url=f"{place.url}/"), 1)
    assert place.opened().latest().checkpoint_id == "step-1"
    for bad in (f"{place.url}//b", f"{place.url}//", f"{place.url}/./b", f"{place.url}/../b"):
        there = replace(place, url=bad)
        for face in (there.writer, there.reader, there.opened):
            told(face, InvalidInputError, seconds=5)


@on("obstore-seaweedfs", "obstore-moto", "s3fs-seaweedfs", "s3fs-moto", "gcsfs-fakegcs")
def test_a_buckets_name_may_have_dots(place):
    """Not on Azure, whose containers' names have none."""
    name, client = f"team.{secrets.token_hex(4)}.v1", place.server.client()
    client.create_bucket(Bucket=name) if place.server.scheme == "s3" else client.create_bucket(name)
    check_round_trip(replace(place, url=place.url.replace(f"//{place.server.bucket}/", f"//{name}/")), 1)
