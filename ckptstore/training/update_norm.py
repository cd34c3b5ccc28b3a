"""How far the weights moved: measured on a choice of them that is the same on every world size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ckptstore.errors import InvalidInputError
from ckptstore.format.canonical import canonical_json
from ckptstore.format.checksum import digest
from ckptstore.training.meeting import Meeting, digest_of

MAX_GATHERED = 200_000
"""Parameters times ranks up to which rank 0 is told what each rank holds, where ranks hold different things."""

_NAME_DIGITS = 16

Pieces = Mapping[str, Sequence[Any]]
"""What a rank holds of each parameter: how many elements it has in all, and what names the piece."""
Way = Literal["alike", "gather", "none"]


class UpdateNorm:
    """Measures how far a step moved the weights, on a choice of them that is the same on every world size.

    Whole parameters are chosen, in an order drawn from their names, as long as they fit into `max_elements`. Where
    several ranks hold the same piece, one counts it, so that the ranks' numbers add up. As a rule ranks hold the same
    names on one mesh: then digests are all that travels. Else rank 0 chooses; of very many, nothing is measured.

    Args:
        names: The parameters by name: plain ones, and DTensors, of which this rank holds a shard.
        max_elements: How many elements are measured, all ranks together. Their values are held twice meanwhile.
        meeting: The ranks, all of which make one; None: this process counts what it has.

    Raises:
        InvalidInputError: A parameter has no values yet, on some rank.
    """

    def __init__(
        self,
        names: Mapping[str, torch.nn.Parameter],
        *,
        max_elements: int = 2**22,
        meeting: Meeting | None = None,
    ) -> None:
        ranks = meeting or Meeting(one_rank=True)
        held: dict[str, list[Any]] = {}

        def mine() -> tuple[str, int]:
            held.update((name, [each.numel(), _piece(name, each)]) for name, each in names.items() if _moves(each))
            return _layout({name: names[name] for name in held}, ranks.world_size), len(held)

        way = ranks.decide("layouts", mine, _way)
        chosen: Mapping[str, int] = {}
        self.of: str = ""
        """What names this choice: norms of different choices cannot be compared. Empty: nothing is measured."""
        if way == "alike":
            sizes = {name: int(size) for name, (size, _) in held.items()}
            chosen = {name: _is_first(names[name], ranks) << ranks.rank for name in _choice(sizes, max_elements)}
            self.of = _name_of_choice([*chosen], sizes)
        elif way == "gather":
            chosen, self.of = ranks.decide(
                "pieces", lambda: held, lambda everybody: _shared_out(everybody, max_elements)
            )
        self.chosen: tuple[str, ...] = tuple(chosen)
        """The names of the parameters that are measured, all ranks together."""
        self._mine = {name: names[name] for name, counting in chosen.items() if counting >> ranks.rank & 1}
        self._before: dict[str, torch.Tensor] | None = None

    def start(self) -> None:
        """Remember the weights as they are now, in memory of their devices."""
        self._before = {name: _local(each).clone() for name, each in self._mine.items()}

    def advance(self) -> float:
        """Return the sum of squares by which this rank's weights moved since the last call, or `start`.

        Add those of all ranks up; the norm is the square root. Waits for the devices.

        Raises:
            InvalidInputError: `start` was not called.
        """
        if self._before is None:
            raise InvalidInputError("The weights to compare with are not known.", hint="Call start() before the step.")
        moved = []
        for name, each in self._mine.items():
            now = _local(each)
            moved.append(_squares(now, self._before[name]))
            self._before[name].copy_(now)
        return float(sum(each.item() for each in moved))

    def stop(self) -> None:
        """Let go of the memory."""
        self._before = None


def _piece(name: str, parameter: torch.Tensor) -> list[Any]:
    """Return what is the same on two ranks if and only if they hold the same elements."""
    if parameter.is_meta:
        raise InvalidInputError(f"The parameter {name!r} has no values yet.", hint="Materialize the model first.")
    if not isinstance(parameter, DTensor):
        return []
    coordinate: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
    at = [where for where, placed in zip(coordinate, parameter.placements, strict=False) if not placed.is_replicate()]
    return [str(parameter.placements), list(parameter.device_mesh.shape), at]


def _layout(names: Mapping[str, torch.Tensor], world_size: int) -> str:
    """Return what is the same on all ranks if each knows without asking who counts what; empty: they do not."""
    meshes: dict[DeviceMesh, list[int]] = {}
    said: dict[str, list[Any]] = {}
    for name, each in names.items():
        said[name] = [each.numel()]
        if isinstance(each, DTensor) and world_size > 1:
            mesh = each.device_mesh
            members = meshes.setdefault(mesh, mesh.mesh.flatten().tolist())
            if len(members) != world_size or mesh.get_coordinate() is None:
                return ""
            said[name] += [str(each.placements), list(mesh.mesh.shape), digest(canonical_json(members)).hex()]
    return digest_of(said)


def _way(layouts: Sequence[tuple[str, int]]) -> Way:
    if layouts[0][0] and len({layout for layout, _ in layouts}) == 1:
        return "alike"
    return "gather" if sum(count for _, count in layouts) <= MAX_GATHERED else "none"


def _is_first(parameter: torch.Tensor, ranks: Meeting) -> bool:
    """Return whether this rank counts its piece, where all ranks have one layout."""
    if ranks.is_alone:
        return True
    if not isinstance(parameter, DTensor):
        return ranks.rank == 0
    coordinate: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
    return not any(
        where for where, placed in zip(coordinate, parameter.placements, strict=True) if placed.is_replicate()
    )


def _shared_out(everybody: Sequence[Pieces], room: int) -> tuple[dict[str, int], str]:
    """Return the choice with who counts, the ranks as bits: the lowest of those that hold a piece; and its name."""
    sizes = {name: int(size) for each in everybody for name, (size, _) in each.items()}
    chosen: dict[str, int] = {}
    for name in _choice(sizes, room):
        counted: set[str] = set()
        chosen[name] = 0
        for rank, each in enumerate(everybody):
            if name in each and (piece := repr(each[name])) not in counted:
                counted.add(piece)
                chosen[name] |= 1 << rank
    return chosen, _name_of_choice([*chosen], sizes)


def _moves(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex())


def _choice(sizes: Mapping[str, int], room: int) -> Iterable[str]:
    for name in sorted(sizes, key=lambda name: (digest(name.encode()), name)):
        if 0 < sizes[name] <= room:
            room -= sizes[name]
            yield name


def _name_of_choice(chosen: Sequence[str], sizes: Mapping[str, int]) -> str:
    if not chosen:
        return ""
    return digest(canonical_json([[name, sizes[name]] for name in chosen])).hex()[:_NAME_DIGITS]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    plain = parameter.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


@torch.no_grad()
def _squares(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    if now.is_complex():
        now, before = torch.view_as_real(now), torch.view_as_real(before)
    wide = torch.float32 if now.device.type == "mps" else torch.float64  # which mps has not
    difference = now.to(wide) - before.to(wide)
    return (difference * difference).sum()
