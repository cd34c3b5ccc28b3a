"""How far the weights moved: measured on a choice of them that is the same on every world size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptstore.errors import InvalidInputError
from ckptstore.format.canonical import canonical_json
from ckptstore.format.checksum import digest

Pieces = Mapping[str, Sequence[Any]]
"""What a rank holds of each parameter: how many elements it has in all, and what names the piece."""

_NAME_DIGITS = 16


class UpdateNorm:
    """Measures how far a step moved the weights, on a choice of them that is the same on every world size.

    Whole parameters are chosen, in an order drawn from their names, as long as they fit into `max_elements`. Where
    several ranks hold the same piece, the lowest counts it, so that the ranks' numbers add up.

    Args:
        names: The parameters by name: plain ones, and DTensors, of which this rank holds a shard.
        max_elements: How many elements are measured, all ranks together. Their values are held twice meanwhile.
        rank: Of this process, among those that `gather` asks.
        gather: Returns what every rank passed to it, by rank. Called once, here, on every rank. By default this
            process is alone.

    Raises:
        InvalidInputError: A parameter has no values yet.
    """

    def __init__(
        self,
        names: Mapping[str, torch.nn.Parameter],
        *,
        max_elements: int = 2**22,
        rank: int = 0,
        gather: Callable[[Pieces], Sequence[Pieces]] | None = None,
    ) -> None:
        held = {name: [each.numel(), _piece(name, each)] for name, each in names.items() if _moves(each)}
        everybody: Sequence[Pieces] = [held] if gather is None else gather(held)
        sizes = {name: int(size) for each in everybody for name, (size, _) in each.items()}
        self.chosen: tuple[str, ...] = tuple(_choice(sizes, max_elements))
        """The names of the parameters that are measured, all ranks together."""
        self.of: str = _name_of_choice(self.chosen, sizes)
        """What names this choice: norms of different choices cannot be compared."""
        self._mine = {
            name: names[name]
            for name in self.chosen
            if name in held and rank == min(at for at, each in enumerate(everybody) if each.get(name) == held[name])
        }
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
