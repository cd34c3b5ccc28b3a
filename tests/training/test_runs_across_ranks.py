"""Whole trainings that ranks hold together: replicas, shards, stages of a pipeline."""

import pytest
import torch
import torch.distributed as dist
from states import same
from stepping import everything
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ckptstore import CheckpointStore
from ckptstore.errors import DisagreementError, IncompatibleStateError, InvalidInputError
from ckptstore.training import (
    Checkpointer,
    GrownVocabulary,
    Matrix,
    Progress,
    TrainingState,
    models,
    resume,
)

ROWS = 10


class Average:
    """Of weights, laid out as they are."""

    def __init__(self, model):
        self.held = {name: each.detach().clone() for name, each in models.named_parameters(model).items()}

    def update(self, model):
        for name, each in models.named_parameters(model).items():
            self.held[name].lerp_(each.detach(), 0.25)

    def state_dict(self):
        return {"shadow": self.held}

    def load_state_dict(self, state):
        self.held = state["shadow"]


class Replicas:
    """A training under DDP or FSDP2, or under DDP with statistics that every replica counts for itself."""

    def __init__(self, url, wrap, seed, *, tokens=7, migrators=(), matrix=None):
        self.rank, self.ranks, self.tokens = dist.get_rank(), dist.get_world_size(), tokens
        torch.manual_seed(seed)
        norm = nn.BatchNorm1d(16) if wrap == "own" else nn.LayerNorm(16)
        self.model = nn.Sequential(nn.Embedding(tokens, 8), nn.Linear(8, 16), norm, nn.Linear(16, tokens))
        self.model = (fully_shard if wrap == "fsdp2" else DistributedDataParallel)(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.average = None if migrators else Average(self.model)
        self.progress = Progress()
        self.state = TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            ema=self.average,
            progress=self.progress,
            migrators=migrators,
        )
        self.checkpointer = Checkpointer(url, self.state, background=False, proof_steps=2, matrix=matrix)

    def step(self):
        generator = torch.Generator().manual_seed(self.progress.global_step)
        rows = torch.randint(7, (ROWS,), generator=generator).tensor_split(self.ranks)[self.rank]
        ids = torch.arange(ROWS).tensor_split(self.ranks)[self.rank]
        loss = functional.cross_entropy(self.model(rows), (rows + 1) % 7, reduction="sum") / ROWS
        (loss * self.ranks).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.model)
        self.progress.global_step += 1
        dist.all_reduce(loss.detach_())
        self.checkpointer.observe(loss=loss, batch_ids=ids)
        return loss.item()

    def seen(self):
        found = everything(self.model, self.optimizer)
        for name, each in self.average.held.items() if self.average is not None else ():
            found["tensors"][f"ema.{name}"] = (each.full_tensor() if isinstance(each, DTensor) else each).clone()
        return found


def saved(url, wrap):
    """Train two steps, save, and return what there was then, and what two more steps did."""
    training = Replicas(url, wrap, 1)
    losses = [training.step() for _ in range(2)]
    training.checkpointer.save()
    at_save = training.seen()
    losses += [training.step() for _ in range(2)]
    training.checkpointer.close()
    return at_save, losses, training.seen()


def resumed(url, wrap, matrix=None):
    training = Replicas(url, wrap, 2, matrix=matrix)
    report = training.checkpointer.resume()
    at_resume = training.seen()
    losses = [training.step() for _ in range(2)]
    training.checkpointer.close()
    return at_resume, losses, training.seen(), report.proof.verdict


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_replicas_and_shards_go_on_as_one_run_would_on_other_numbers_of_ranks(gang, tmp_path, wrap):
    at_save, losses, _ = gang.values(2, saved, str(tmp_path / "run"), wrap)[0]
    for ranks in (3, 1):
        for at_resume, after, _, verdict in gang.values(ranks, resumed, str(tmp_path / "run"), wrap):
            assert same(at_resume, at_save)
            assert after == pytest.approx(losses[2:], rel=1e-5)
            assert verdict == "proved"


class OneRow:
    """FSDP2 with momentum: of three ranks only the first two have a row of the weight, on two both."""

    def __init__(self, url, seed):
        torch.manual_seed(seed)
        self.model = fully_shard(nn.Linear(3, 2, bias=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.checkpointer = Checkpointer(url, TrainingState(model=self.model, optimizer=self.optimizer))

    def step(self):
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def save_rows(url):
    one = OneRow(url, 1)
    one.step()
    one.checkpointer.save()
    one.checkpointer.close()
    return everything(one.model, one.optimizer)


def resume_rows(url):
    one = OneRow(url, 2)
    report = one.checkpointer.resume()
    one.checkpointer.close()
    return everything(one.model, one.optimizer), report.checks


@pytest.mark.parametrize(("ranks", "now"), [(2, 3), (3, 2)])
def test_a_rank_whose_shard_is_empty_has_lost_nothing(gang, tmp_path, ranks, now):
    saved_rows = gang.values(ranks, save_rows, str(tmp_path / "run"))[0]
    for found, _ in gang.values(now, resume_rows, str(tmp_path / "run")):
        assert same(found, saved_rows)


def refused(url, wrap):
    with pytest.raises(IncompatibleStateError, match="fsdp: 1 → 2") as error:
        Replicas(url, wrap, 2).checkpointer.resume()
    return error.value.hint


def test_replicas_go_on_as_shards_only_where_the_matrix_says_so(gang, tmp_path):
    at_save, losses, _ = gang.values(2, saved, str(tmp_path / "run"), "ddp")[0]
    assert "ckptstore drill reshard URL --from" in gang.values(2, refused, str(tmp_path / "run"), "fsdp2")[0]
    entry = {"from": {"dp": 2}, "to": {"dp": 2, "fsdp": 2, "zero": 3}, "status": "verified", "evidence": "this test"}
    for at_resume, after, _, verdict in gang.values(2, resumed, str(tmp_path / "run"), "fsdp2", Matrix.read([entry])):
        assert same(at_resume["tensors"], at_save["tensors"])
        assert after == pytest.approx(losses[2:], rel=1e-5)
        assert verdict == "proved"


def test_replicas_with_statistics_of_their_own_go_on_bit_by_bit(gang, tmp_path):
    """DDP gives the buffers of rank 0 to the others; those of another rank, or some of each, would be another model."""
    expected = gang.values(2, saved, str(tmp_path / "run"), "own")
    found = gang.values(2, resumed, str(tmp_path / "run"), "own")
    assert not same(expected[0][0], expected[1][0])
    for at_resume, after, at_end, verdict in found:
        assert same(at_resume, expected[0][0])
        assert after == expected[0][1][2:]
        assert same(at_end["tensors"]["model.3.weight"], expected[0][2]["tensors"]["model.3.weight"])
        assert verdict == "proved"
    assert same(found[0][2], expected[0][2])


GROWN = ("0.weight", "3.weight", "3.bias")


def grown(url):
    migrators = [GrownVocabulary(keys=GROWN, fill="mean")]
    before = Replicas(url, "fsdp2", 1, migrators=migrators)
    for _ in range(2):
        before.step()
    before.checkpointer.save()
    at_save = before.seen()["tensors"]
    after = Replicas(url, "fsdp2", 2, tokens=10, migrators=migrators)
    report = after.checkpointer.resume()
    at_resume = after.seen()["tensors"]
    after.step()
    return at_save, at_resume, report.migrated, after.progress.global_step


def test_a_vocabulary_grows_under_fsdp2(gang, tmp_path):
    for at_save, at_resume, migrated, step in gang.values(2, grown, str(tmp_path / "run")):
        assert at_save.keys() == at_resume.keys()
        for key, was in at_save.items():
            now = at_resume[key]
            if not was.dim() or not any(name in key for name in GROWN):
                assert torch.equal(now, was), key
                continue
            assert torch.equal(now[:7], was), key
            filled = was.mean(0).expand(3, *was.shape[1:]) if key.startswith("model.") else torch.zeros_like(now[7:])
            assert torch.allclose(now[7:], filled), key
        assert len(migrated) == 3
        assert step == 3


class Counting(nn.BatchNorm1d):
    """It has something beside parameters and buffers, too."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls, "seen": torch.full((2000,), float(self.calls))}

    def set_extra_state(self, state):
        assert torch.equal(state["seen"], torch.full((2000,), float(state["calls"])))
        self.calls = state["calls"]


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.other(torch.tanh(self.one(x)))


class Pipeline:
    """Rank 0 has the first stage and rank 1 the last one, each with names that the other has not."""

    def __init__(self, url, seed, *, outputs=1, migrators=()):
        self.rank = dist.get_rank()
        torch.manual_seed(seed)
        first = {"up": nn.Linear(6, 8), "norm": Counting(8)}
        last = {"mid": nn.Linear(8, 8), "tied": Tied(), "wide": Counting(8), "down": nn.Linear(8, outputs)}
        self.stage = nn.ModuleDict([first, last][self.rank])
        matrices = [each for each in self.stage.parameters() if each.dim() > 1]
        others = [each for each in self.stage.parameters() if each.dim() == 1]
        self.optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.progress = Progress()
        self.state = TrainingState(
            model=self.stage,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            progress=self.progress,
            parallelism={"dp": 1, "pp": 2},
            migrators=migrators,
        )
        self.checkpointer = Checkpointer(url, self.state, background=False, proof_steps=2)

    def _forward(self, x):
        for module in self.stage.values():
            x = module(x)
        return x

    def micro_step(self):
        generator = torch.Generator().manual_seed(2 * self.progress.global_step + self.progress.micro_step)
        inputs, wanted = torch.randn(5, 6, generator=generator), torch.randn(5, 1, generator=generator)
        between, loss = torch.empty(5, 8), torch.zeros(())
        if self.rank == 0:
            out = self._forward(inputs)
            dist.send(out.detach(), 1)
            dist.recv(between, 1)
            out.backward(between)
        else:
            dist.recv(between, 0)
            loss = functional.mse_loss(self._forward(between.requires_grad_()), wanted)
            loss.backward()
            dist.send(between.grad, 0)
        self.progress.micro_step += 1
        return loss

    def step(self):
        while self.progress.micro_step < 2:
            loss = self.micro_step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.progress.micro_step = 0
        self.progress.global_step += 1
        self.checkpointer.observe(loss=loss)

    def seen(self):
        calls = [each.calls for each in self.stage.values() if isinstance(each, Counting)]
        return {**everything(self.stage, self.optimizer), "calls": calls}


def piped(url):
    one = Pipeline(url, 1)
    one.step()
    one.micro_step()
    one.checkpointer.save()
    at_save = one.seen()
    one.step()
    one.step()
    one.checkpointer.close()
    other = Pipeline(url, 2)
    report = other.checkpointer.resume()
    resumed = other.seen()
    other.step()
    other.step()
    other.checkpointer.close()
    return same(resumed, at_save), same(other.seen(), one.seen()), report.proof.verdict, sorted(other.stage)


def test_stages_of_a_pipeline_are_saved_and_resumed_by_who_holds_them(gang, tmp_path):
    found = gang.values(2, piped, str(tmp_path / "run"))
    assert found == [
        (True, True, "proved", ["norm", "up"]),
        (True, True, "proved", ["down", "mid", "tied", "wide"]),
    ]


def grown_at_the_end(url):
    one = Pipeline(url, 1)
    one.step()
    one.checkpointer.save()
    migrator = GrownVocabulary(keys=("down.weight", "down.bias"), fill="zeros")
    other = Pipeline(url, 2, outputs=3, migrators=[migrator])
    other.checkpointer.resume()
    return one.seen()["tensors"], other.seen()["tensors"]


def test_one_stage_of_a_pipeline_grows(gang, tmp_path):
    (first, first_now), (last, last_now) = gang.values(2, grown_at_the_end, str(tmp_path / "run"))
    assert same(first_now, first)
    for key, was in last.items():
        now = last_now[key]
        if "down" in key and was.dim():
            assert now.shape == (3, *was.shape[1:])
            assert not now[1:].any()
            now = now[:1]
        assert torch.equal(now, was), key


def contradicting(url):
    pipeline = Pipeline(url, 1)
    pipeline.optimizer.param_groups[1]["layer"] = dist.get_rank()
    with pytest.raises(DisagreementError, match="Ranks 0 and 1 hold different optimizer: groups") as refused:
        pipeline.checkpointer.save()
    return refused.value.hint


def test_stages_that_contradict_each_other_are_refused_when_they_are_saved(gang, tmp_path):
    hints = gang.values(2, contradicting, str(tmp_path / "run"))
    assert "Give all ranks the same" in hints[0]
    assert CheckpointStore.open(tmp_path / "run").latest() is None


class Faulty:
    """Rank 1 has a trouble of its own: its optimizer holds what no model has, or it wants what no state has."""

    def __init__(self, trouble):
        model = nn.Linear(2, 2)
        held = list(model.parameters())
        if trouble == "an unknown parameter" and dist.get_rank() == 1:
            held.append(nn.Parameter(torch.ones(2)))
        optimizer = torch.optim.SGD(held, lr=0.1)
        self.state = TrainingState(model=model, optimizer=optimizer)
        self.only = ("nothing",) if trouble == "an unknown name" and dist.get_rank() == 1 else None


def resume_in_trouble(url, trouble):
    if trouble is None:
        Checkpointer(url, Faulty(trouble).state, background=False).save()
        return None
    faulty = Faulty(trouble)
    with pytest.raises(InvalidInputError) as refused:
        resume(faulty.state, url, only=faulty.only)
    return refused.value.message


@pytest.mark.parametrize(
    ("trouble", "said"),
    [("an unknown parameter", "a parameter [2] that the model does not have"), ("an unknown name", "no such part")],
)
def test_what_one_rank_cannot_do_all_ranks_refuse_alike(gang, tmp_path, trouble, said):
    gang.values(2, resume_in_trouble, str(tmp_path / "run"), None)
    one, other = gang.values(2, resume_in_trouble, str(tmp_path / "run"), trouble)
    assert one == other
    assert one.startswith("Rank 1: ")
    assert said in one
