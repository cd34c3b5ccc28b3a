"""A vocabulary that has grown: the worked example of a migrator, from the gate to the next step."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import storage_writers as sw
from ckptstore import CheckpointStore, IncompatibleStateError, InvalidInputError
from ckptstore.training.differences import ABSENT, Difference
from ckptstore.training.fingerprints import fingerprint
from ckptstore.training.gate import Facts, check
from ckptstore.training.migrate import GrownVocabulary, migrated, plan

KEYS = ("embed.weight", "head.weight", "head.bias")
MIGRATOR = GrownVocabulary(KEYS, fields=("model.vocab_size", "tokenizer"))
MOMENTS = ("exp_avg", "exp_avg_sq")

_runs = itertools.count()


class Model(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(vocabulary, 4), nn.Linear(4, 4), nn.Linear(4, vocabulary)

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def built(vocabulary, seed=0):
    """Return a model and its optimizer, new."""
    torch.manual_seed(seed)
    model = Model(vocabulary)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps=3):
    tokens = torch.arange(11)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()


def tensors(model, optimizer):
    """Return the state by the keys of a checkpoint."""
    names = dict(model.named_parameters())
    moments = {
        f"optimizer.{name}.{moment}": optimizer.state[parameter][moment]
        for name, parameter in names.items()
        for moment in (*MOMENTS, "step")
        if parameter in optimizer.state
    }
    return {**{f"model.{name}": parameter.detach() for name, parameter in names.items()}, **moments}


def facts(model, optimizer, vocabulary):
    prints = {
        "model": fingerprint({"vocab_size": vocabulary, "layers": 1}),
        "tokenizer": fingerprint({"tokens": [f"t{number}" for number in range(vocabulary)]}),
    }
    shapes = {name: ["float32", list(parameter.shape)] for name, parameter in model.named_parameters()}
    return Facts(
        fingerprints={name: one.digest for name, one in prints.items()},
        documents={name: one.document for name, one in prints.items()},
        parallelism={"dp": 1},
        state={
            "components": ["model", "optimizer"],
            "models": {"model": {"parameters": shapes}},
            "optimizers": {"optimizer": {"class": type(optimizer).__name__, "groups": 1}},
        },
    )


def forms(state):
    return {key: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for key, tensor in state.items()}


def test_a_run_goes_on_with_a_vocabulary_that_has_grown():
    url = f"memory://migrate-{next(_runs)}"
    model, optimizer = built(11)
    train(model, optimizer)
    saved = facts(model, optimizer, 11)
    writer = sw.CkptStoreWriter(url)
    writer.describe(
        fingerprints=saved.fingerprints,
        parallelism=saved.parallelism,
        documents={"prints": saved.documents, "state": saved.state},
    )
    sw.save(tensors(model, optimizer), checkpoint_id="a", storage_writer=writer)

    grown, fresh = built(13, seed=1)
    checkpoint = CheckpointStore.open(url).latest()
    commit, documents = checkpoint.commit, checkpoint.documents()
    said = Facts(
        fingerprints=commit.fingerprints,
        documents=documents["prints"],
        parallelism=commit.parallelism,
        state=documents["state"],
    )
    with pytest.raises(IncompatibleStateError, match=r"vocab_size: 11 → 13"):
        check(said, facts(grown, fresh, 13))
    report = check(said, facts(grown, fresh, 13), migrators=[MIGRATOR])
    assert len(report.migrated) == len(KEYS) + 3  # the size, and two tokens

    targets = {f"model.{name}": parameter.detach() for name, parameter in grown.named_parameters()}
    targets |= {
        f"optimizer.{name}.{moment}": torch.zeros_like(parameter)
        for name, parameter in grown.named_parameters()
        for moment in MOMENTS
    }
    was = {key: (each.dtype, each.shape) for key, each in checkpoint.keys.items()}
    who = plan(was, forms(targets), [MIGRATOR])
    assert sorted(who) == sorted(
        [f"model.{key}" for key in KEYS] + [f"optimizer.{key}.{moment}" for key in KEYS for moment in MOMENTS]
    )
    read = {key: torch.from_numpy(checkpoint.read(key).copy()) for key in checkpoint.keys}
    restored = {
        key: migrated(who[key], key, saved=value, target=targets[key]) if key in who else value
        for key, value in read.items()
    }
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            parameter.copy_(restored[f"model.{name}"])
            fresh.state[parameter] = {moment: restored[f"optimizer.{name}.{moment}"] for moment in (*MOMENTS, "step")}

    tokens = torch.arange(11)
    assert torch.allclose(grown(tokens)[:, :11], model(tokens), rtol=0, atol=1e-6)
    assert all(torch.equal(grown.state_dict()[key][:11], model.state_dict()[key]) for key in KEYS)
    assert torch.equal(grown.body.weight, model.body.weight)
    assert torch.equal(grown.embed.weight[11], model.embed.weight.mean(0))
    for parameter, other in ((grown.embed.weight, model.embed.weight), (grown.head.bias, model.head.bias)):
        for moment in MOMENTS:
            assert torch.equal(fresh.state[parameter][moment][:11], optimizer.state[other][moment])
            assert not fresh.state[parameter][moment][11:].any()
    before = grown.body.weight.detach().clone()
    train(grown, fresh, steps=1)
    assert not torch.equal(grown.body.weight, before)
    assert torch.isfinite(torch.cat([parameter.flatten() for parameter in grown.parameters()])).all()
    assert {float(state["step"]) for state in fresh.state.values()} == {4.0}


def test_what_no_migrator_covers_is_refused_with_all_of_it():
    was = {"model.body.weight": ("float32", (4, 4)), "model.embed.weight": ("float32", (11, 4)), "same": ("int64", ())}
    now = {"model.body.weight": ("float32", (5, 4)), "model.embed.weight": ("bfloat16", (13, 4)), "same": ("int64", ())}
    with pytest.raises(IncompatibleStateError) as caught:
        plan(was, now, [MIGRATOR])
    assert [each["path"] for each in caught.value.facts["differences"]] == ["model.body.weight", "model.embed.weight"]
    assert plan(was, was, []) == {}


def shape(key, *sides):
    return Difference(key, *sides)


@pytest.mark.parametrize(
    ("difference", "covered"),
    [
        (shape("state.models.model.parameters.embed.weight", ["float32", [11, 4]], ["float32", [13, 4]]), True),
        (shape("optimizer.embed.weight.exp_avg", ["float32", [11, 4]], ["float32", [13, 4]]), True),
        (shape("model.head.bias", ["float32", [11]], ["float32", [13]]), True),
        (Difference("fingerprints.model.vocab_size", 11, 13), True),
        (Difference("fingerprints.tokenizer.tokens[11]", ABSENT, "t11"), True),
        (Difference("fingerprints.model.layers", 1, 2), False),
        (Difference("fingerprints.tokenizers", 1, 2), False),
        (shape("model.embed.weight", ["float32", [13, 4]], ["float32", [11, 4]]), False),
        (shape("model.embed.weight", ["float32", [11, 4]], ["float32", [13, 5]]), False),
        (shape("model.embed.weight", ["float32", [11, 4]], ["float16", [13, 4]]), False),
        (shape("model.other_embed.weight", ["float32", [11, 4]], ["float32", [13, 4]]), False),
        (shape("model.embed.weights", ["float32", [11, 4]], ["float32", [13, 4]]), False),
        (shape("model.embed.weight", ABSENT, ["float32", [13, 4]]), False),
    ],
    ids=str,
)
def test_a_grown_vocabulary_is_added_rows_of_its_own_parameters_and_nothing_else(difference, covered):
    assert MIGRATOR.covers(difference) is covered


@pytest.mark.parametrize(
    ("fill", "key", "right"),
    [
        ("mean", "model.embed.weight", [2.0, 3.0]),
        ("zeros", "model.embed.weight", [0.0, 0.0]),
        ("target", "model.embed.weight", [9.0, 9.0]),
        ("mean", "optimizer.embed.weight.exp_avg", [0.0, 0.0]),
        ("target", "ranks/00003/gradients.embed.weight", [0.0, 0.0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_rows_are_filled_as_is_said_and_old_ones_stay(fill, key, right, dtype):
    saved = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype)
    target = torch.full((3, 2), 9.0, dtype=dtype)
    made = migrated(GrownVocabulary(("embed.weight",), fill=fill), key, saved=saved, target=target)
    assert made.tolist() == [[1.0, 2.0], [3.0, 4.0], right]
    assert (made.dtype, target.tolist()) == (dtype, [[9.0, 9.0]] * 3)


def test_what_is_no_grown_vocabulary_is_refused():
    for saved, target in (
        (torch.ones(3, 2), torch.ones(2, 2)),
        (torch.ones(2, 2), torch.ones(3, 3)),
        (torch.ones(2, 2), torch.ones(3, 2, dtype=torch.float64)),
        (torch.ones(()), torch.ones(3)),
    ):
        with pytest.raises(IncompatibleStateError, match="no grown vocabulary"):
            MIGRATOR.migrate("model.embed.weight", saved, target)


class Wrong:
    name = "wrong"

    def __init__(self, made):
        self.made = made

    def covers(self, difference):  # noqa: ARG002  (the protocol's)
        return True

    def migrate(self, key, saved, target):  # noqa: ARG002  (the protocol's)
        return target if self.made is None else self.made


@pytest.mark.parametrize("made", [None, torch.ones(2), torch.ones(3, dtype=torch.float64), [1.0, 1.0, 1.0]], ids=str)
def test_what_a_migrator_makes_is_checked_and_it_is_named(made):
    with pytest.raises(IncompatibleStateError, match=r"The migrator wrong made .* of model\.x"):
        migrated(Wrong(made), "model.x", saved=torch.ones(2), target=torch.ones(3))


@pytest.mark.parametrize(
    "wrong", [{"keys": ()}, {"keys": "embed.weight"}, {"keys": ("a",), "fill": "noise"}, {"keys": (1,)}]
)
def test_a_grown_vocabulary_that_says_too_little_is_refused(wrong):
    with pytest.raises(InvalidInputError):
        GrownVocabulary(**wrong)
