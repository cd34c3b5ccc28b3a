"""The planner of `save`: DCP's plans, made once for a state that stays the same, and never of another save."""

import pickle

import pytest
import torch
from states import blank, same
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import storage_writers as sw
from ckptstore.errors import CkptStoreError, DisagreementError, InvalidInputError
from storage_writers import save_planner
from storage_writers.global_plan import merged
from storage_writers.packed import index_of


def a_state():
    return {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(()), 3: torch.ones(2, dtype=torch.int8)},
        "list": [1, 2],
        "groups": [{"params": [0, 1], "lr": 0.1}, torch.zeros(2)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": {},
        "none": None,
        "tuple": (torch.ones(1), 2),
    }


def plan_of(state, planner=None):
    planner = planner or sw.SavePlanner()
    planner.set_up_planner(state, None, is_coordinator=True)
    return planner.create_local_plan()


def loaded(url, like, name):
    target = blank(like)
    sw.load(target, storage_reader=sw.CkptStoreReader(url, checkpoint_id=name))
    return target


def test_it_plans_what_dcp_plans_by_itself():
    theirs, ours = DefaultSavePlanner(), sw.SavePlanner()
    plans = [plan_of(a_state(), theirs), plan_of(a_state(), ours)]
    assert plans[0] == plans[1]
    assert list(theirs.mappings.items()) == list(ours.mappings.items())
    assert theirs.create_global_plan([plans[0]]) == ours.create_global_plan([plans[1]])


def test_two_values_under_one_key_are_refused_as_by_dcp():
    with pytest.raises(ValueError, match=r"a\.b"):
        plan_of({"a": {"b": 1}, "a.b": torch.ones(1)})


def test_a_state_of_the_same_structure_gets_the_items_made_before_with_new_values():
    first, state = plan_of(a_state()), a_state()
    state["model"]["w"] += 1
    state["list"] = "another value"
    again = plan_of(state)
    assert all(one is other for one, other in zip(first.items, again.items, strict=True))
    assert again.items is not first.items


CHANGES = {
    "a shape": lambda model: model.update(w=torch.zeros(4, 3)),
    "a dtype": lambda model: model.update(w=model["w"].double()),
    "a key": lambda model: model.update(v=model.pop("w")),
    "a key more": lambda model: model.update(v=torch.zeros(1)),
    "a key less": lambda model: model.pop("b"),
    "a tensor that is a value now": lambda model: model.update(w=1.5),
    "a parameter that learns": lambda model: model.update(w=torch.nn.Parameter(model["w"])),
    "the order": lambda model: model.update(w=model.pop("w")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_structure_gets_a_plan_of_its_own(change):
    before, state = plan_of(a_state()), a_state()
    change(state["model"])
    fresh = plan_of(state, DefaultSavePlanner())
    assert plan_of(state) == fresh != before


def test_what_is_kept_is_limited():
    for index in range(5):
        plan_of({f"w{index}": torch.zeros(1)})
    assert len(save_planner._kept._items) == save_planner.MAX_KEPT


def test_weights_tied_and_untied_between_saves_come_back_each_as_it_was(url):
    writer, shared = sw.CkptStoreWriter(url), torch.arange(4.0)
    tied = {"model": {"in": shared, "out": shared}}
    sw.save(tied, checkpoint_id="tied", storage_writer=writer)
    untied = {"model": {"in": shared, "out": torch.full((4,), 7.0)}}
    sw.save(untied, checkpoint_id="untied", storage_writer=writer)
    assert same(loaded(url, tied, "tied"), tied)
    assert same(loaded(url, untied, "untied"), untied)


def test_one_planner_for_two_saves_and_two_runs_puts_each_where_it_belongs(url):
    planner, writers = sw.SavePlanner(), [sw.CkptStoreWriter(url), sw.CkptStoreWriter(f"{url}-other")]
    states = {}
    for step in (1, 2):
        for writer, root in zip(writers, (url, f"{url}-other"), strict=True):
            states[root, step] = {"w": torch.full((3,), len(states)), "step": len(states)}
            sw.save(states[root, step], checkpoint_id=f"step-{step}", storage_writer=writer, planner=planner)
            assert planner._enable_plan_caching is False
    for (root, step), state in states.items():
        assert same(loaded(root, state, f"step-{step}"), state)


def test_it_travels_to_another_process_without_the_state(url):
    planner, state = sw.SavePlanner(dedup_save_to_lowest_rank=True), {"w": torch.zeros(1 << 18)}
    sw.save(state, checkpoint_id="here", storage_writer=sw.CkptStoreWriter(url), planner=planner)
    sent = pickle.dumps(planner)
    assert len(sent) < 2000
    copy = pickle.loads(sent)  # noqa: S301  (made above)
    assert copy.dedup_save_to_lowest_rank
    sw.save(state, checkpoint_id="there", storage_writer=sw.CkptStoreWriter(url), planner=copy)
    assert same(loaded(url, state, "there"), state)


def test_what_all_ranks_hold_is_written_once_and_evenly():
    state = {f"w{index}": torch.zeros(100) for index in range(8)}
    plans = [plan_of(state) for _ in range(4)]
    spread, metadata = merged(plans, to_lowest_rank=False)
    assert [len(plan.items) for plan in spread] == [2, 2, 2, 2]
    assert sorted(item.index.fqn for plan in spread for item in plan.items) == sorted(state)
    assert all(len(each.chunks) == 1 for each in metadata.state_dict_metadata.values())
    lowest, _ = merged(plans, to_lowest_rank=True)
    assert [len(plan.items) for plan in lowest] == [8, 0, 0, 0]


def test_ranks_that_contradict_each_other_are_refused_with_the_key():
    plans = [plan_of({"w": torch.zeros(2), "v": 1}), plan_of({"w": torch.zeros(3), "v": 1})]
    with pytest.raises(DisagreementError, match=r"w is torch\.float32 \[3\] on rank 1"):
        merged(plans, to_lowest_rank=False)
    with pytest.raises(DisagreementError, match="v is"):
        merged([plans[0], plan_of({"w": torch.zeros(2), "v": torch.zeros(1)})], to_lowest_rank=False)


def in_pieces(*bounds):
    """Return the plan of a rank that holds these rows of a tensor of 8."""
    properties, size = TensorProperties(torch.float32), torch.Size([8])
    pieces = [ChunkStorageMetadata(torch.Size([start]), torch.Size([end - start])) for start, end in bounds]
    return SavePlan(
        [
            WriteItem(
                index_of("w", piece.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(piece, properties, size)
            )
            for piece in pieces
        ]
    )


HALVES, WHOLE, THIRDS = [(0, 4), (4, 8)], [(0, 8)], [(0, 3), (3, 6), (6, 8)]


@pytest.mark.parametrize("sent", [False, True], ids=["made", "gathered"])
@pytest.mark.parametrize(
    ("cuts", "ranks"),
    [
        ((HALVES, WHOLE), (0, 1)),
        ((WHOLE, HALVES), (0, 1)),
        ((HALVES, HALVES, THIRDS), (0, 2)),
        ((THIRDS, THIRDS, [(6, 7)]), (0, 2)),
        (([(0, 4)], [(4, 8)], [(4, 7)]), (1, 2)),
    ],
)
def test_ranks_that_cut_a_tensor_otherwise_are_refused_with_the_key_and_the_ranks(cuts, ranks, sent):
    plans = [in_pieces(*bounds) for bounds in cuts]
    with pytest.raises(DisagreementError, match=rf"of w at .* on rank {ranks[1]} and .* on rank {ranks[0]}") as caught:
        merged([gathered(plan) for plan in plans] if sent else plans, to_lowest_rank=False)
    assert (caught.value.facts["key"], caught.value.facts["ranks"]) == ("w", [*ranks])


def test_pieces_of_several_lengths_that_ranks_share_are_written_once():
    spread, metadata = merged([in_pieces(*THIRDS), in_pieces(*THIRDS), in_pieces((6, 8))], to_lowest_rank=False)
    written = sorted((item.index.offset, item.tensor_data.chunk.sizes) for plan in spread for item in plan.items)
    assert written == [((0,), (3,)), ((3,), (3,)), ((6,), (2,))]
    assert len(metadata.state_dict_metadata["w"].chunks) == 3


def spread_over_ranks(url):
    """Save one tensor after the other with other placements, and load each."""
    mesh, planner = init_device_mesh("cpu", (2,)), sw.SavePlanner()
    whole, found, writer = torch.arange(24.0).reshape(6, 4), [], sw.CkptStoreWriter(url)
    for step, placement in enumerate([Shard(0), Shard(1), Replicate(), Shard(0)]):
        state = {"w": distribute_tensor(whole + step, mesh, [placement])}
        planner.set_up_planner(state, None, is_coordinator=True)
        fresh = DefaultSavePlanner()
        fresh.set_up_planner(state, None, is_coordinator=True)
        plan = planner.create_local_plan()
        assert plan == fresh.create_local_plan()
        assert plan.items[0] is planner.create_local_plan().items[0]
        sw.save(state, checkpoint_id=f"step-{step}", storage_writer=writer, planner=planner)
        target = {"w": torch.zeros(6, 4)}
        sw.load(target, storage_reader=sw.CkptStoreReader(url, checkpoint_id=f"step-{step}"))
        found.append(torch.equal(target["w"], whole + step))
    return found


def test_another_placement_gets_a_plan_of_its_own(gang, tmp_path):
    assert gang.values(2, spread_over_ranks, str(tmp_path)) == [[True] * 4] * 2


def contradicting(url):
    state = {"w": torch.zeros(2 + torch.distributed.get_rank())}
    with pytest.raises(CkptStoreError) as caught:
        sw.save(state, checkpoint_id="step-1", storage_writer=sw.CkptStoreWriter(url))
    return type(caught.value)


def test_ranks_that_contradict_each_other_write_nothing(gang, tmp_path):
    assert gang.values(2, contradicting, str(tmp_path)) == [DisagreementError] * 2
    assert not list(tmp_path.rglob("*.safetensors"))


def missing_a_piece(url):
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])} if torch.distributed.get_rank() else {}
    if not torch.distributed.get_rank():
        distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    with pytest.raises(CkptStoreError) as caught:
        sw.save(state, checkpoint_id="step-1", storage_writer=sw.CkptStoreWriter(url))
    return type(caught.value), "w" in caught.value.message


def test_a_tensor_of_which_a_piece_is_missing_is_refused_before_a_byte_is_written(gang, tmp_path):
    assert gang.values(2, missing_a_piece, str(tmp_path)) == [(InvalidInputError, True)] * 2
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_plan_without_items_is_as_good_as_any():
    spread, metadata = merged([plan_of({"w": torch.zeros(2)}), SavePlan([])], to_lowest_rank=False)
    assert [len(plan.items) for plan in spread] == [1, 0]
    assert list(metadata.state_dict_metadata) == ["w"]


def gathered(plan):
    """Return a plan as it comes out of DCP's gather."""
    return pickle.loads(pickle.dumps(plan))  # noqa: S301  (made here)


def test_a_plan_that_was_gathered_says_what_it_said_before():
    plan = plan_of(a_state())
    packed = gathered(gathered(plan))
    assert packed.items == plan.items
    assert [*packed.items] == plan.items
    assert packed.items[-1] == plan.items[-1]
    assert len(packed.items) == len(plan.items)
    (spread,), metadata = merged([packed], to_lowest_rank=False)
    assert spread.planner_data is None
    assert metadata == merged([plan], to_lowest_rank=False)[1]
    assert metadata.planner_data == plan.planner_data
    assert gathered(metadata) == metadata
    assert len(gathered(SavePlan([])).items) == len(gathered(plan_of({})).items) == 0


def test_gathered_plans_are_merged_as_others_are():
    states = [{"all": torch.zeros(3), f"only.{rank}": torch.zeros(rank + 1), "value": rank} for rank in range(3)]
    plans = [plan_of(state) for state in states]
    whole, said = merged(plans, to_lowest_rank=False)
    again, same_said = merged([gathered(plan) for plan in plans], to_lowest_rank=False)
    assert said == same_said
    assert [plan.items for plan in whole] == [gathered(plan).items for plan in again]
    assert sorted(item.index.fqn for plan in again for item in plan.items) == sorted(said.state_dict_metadata)
