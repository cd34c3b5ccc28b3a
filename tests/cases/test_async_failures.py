"""A background save that fails is heard of on every rank, at whatever is called next; and nothing waits for ever."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from async_programs import WAYS, Program, hear_of_failures, start
from ranks import Gang
from test_async_worker import free_port

THREADS = WAYS[:2]


def heard_by_two(gang, way, root, word):
    if way in THREADS:
        return gang.values(2, hear_of_failures, root, way, word)
    ended = start("hear_of_failures", root, way, word, ranks=2, port=free_port())
    assert [code for code, _, _ in ended] == [0, 0], [err[-3000:] for _, _, err in ended]
    return [json.loads(out) for _, out, _ in ended]


@pytest.mark.parametrize(
    ("way", "word", "said"),
    [(way, "full", "No space left on device") for way in WAYS]
    + [(way, "denied 1", "403 AccessDenied") for way in WAYS],
)
def test_a_failure_on_all_ranks_or_one_is_raised_by_all_at_the_next_save_wait_or_close(gang, tmp_path, way, word, said):
    ranks = heard_by_two(gang, way, str(tmp_path / "run"), word)
    for name in ("save", "async save", "wait", "close"):
        kinds = {tuple(here[name]) for here in ranks}
        assert len(kinds) == 1
        assert said in ranks[0][name][1]
        assert "Rank 1" in ranks[0][name][1] or word == "full"
        for here in ranks:
            assert here[f"latest after {name}"] == ["good"]
            assert here["in the end"] == ["after", "good"]


@pytest.fixture(scope="module")
def impatient():
    """Ranks in groups whose collectives give up after 20 seconds."""
    gang = Gang(group_seconds=20)
    yield gang
    gang.close()


def train_while_saving(root, way):
    """Three saves, each longer than the time to the next, with collectives of the training in between."""
    program = Program(root, way)
    program.order("slow")
    began = time.monotonic()
    total = torch.zeros(1)
    for step in range(3):
        program.save(f"step-{step}")
        for _ in range(20):
            dist.all_reduce(total.fill_(1))
        assert float(total) == dist.get_world_size()
    dist.barrier()
    program.writer.close()
    return program.kept(), time.monotonic() - began


@pytest.mark.parametrize("way", THREADS)
def test_saves_that_overlap_do_not_stand_in_the_way_of_the_collectives_of_the_training(impatient, tmp_path, way):
    for kept, seconds in impatient.values(2, train_while_saving, str(tmp_path / "run"), way):
        assert kept == ["step-2", "step-1", "step-0"]
        assert seconds < 15
