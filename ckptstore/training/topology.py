"""How a run is spread over its ranks: read from its modules, or said; always checked against the number of ranks.

`dp` counts the ranks that see other samples, `fsdp` how many of these share one copy of the parameters, `tp` and `pp`
the ranks of tensor and pipeline parallelism; `zero` is the stage of what is sharded: 0 nothing, 1 optimizer state, 2
gradients too, 3 parameters too. The ranks are dp · tp · pp, and whatever else is named; fsdp divides dp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckptstore.errors import InvalidInputError, UnsupportedError

NEUTRAL = {"dp": 1, "tp": 1, "pp": 1, "zero": 0, "fsdp": 1}
"""What these are where nobody names them. Any other degree is 1."""
NO_RANKS = frozenset({"zero", "fsdp"})
"""They say how ranks of `dp` work together, and add none."""

_NAMES = {
    "dp": ("dp", "data", "data_parallel", "ddp", "replicate", "dp_replicate"),
    "fsdp": ("fsdp", "shard", "dp_shard"),
    "tp": ("tp", "tensor", "tensor_parallel"),
    "pp": ("pp", "pipeline", "pipeline_parallel"),
}
_DEGREE_OF = {name: degree for degree, names in _NAMES.items() for name in names}
_LAST_STAGE = 3
_SAY = "Say it: parallelism=dict(dp=…, tp=…, pp=…, zero=…, fsdp=…)."


def topology(
    models: nn.Module | Sequence[nn.Module], given: Mapping[str, int] | None = None, *, world_size: int | None = None
) -> dict[str, int]:
    """Return the degrees by name, of which dp, tp, pp, zero and fsdp are always there.

    Ranks that no module speaks of count as data parallel: say `given` for a pipeline whose stages are plain modules.

    Args:
        models: What is trained, as it is wrapped.
        given: What the user says; it must not contradict what the modules say. None: all is read.
        world_size: How many ranks train; by default all.

    Raises:
        InvalidInputError: The degrees do not make the number of ranks, or what was given is not what the modules say,
            or a mesh does not say what it is for.
        UnsupportedError: See `check_kinds`.
    """
    modules = [models] if isinstance(models, nn.Module) else list(models)
    check_kinds(modules)
    if world_size is None:
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    reading = _Reading()
    for module in modules:
        reading.read(module)
    if given is None and reading.unclear is not None:
        raise InvalidInputError(f"{reading.unclear}.", hint=f"Name the dimensions of the mesh. {_SAY}")
    said = {} if given is None else {name: _degree(name, value) for name, value in given.items()}
    for name, value in reading.found.items():
        if said.get(name, value) != value:
            raise InvalidInputError(
                f"parallelism says {name}={said[name]}, the modules say {name}={value}.",
                hint="Say what the modules are, or leave parallelism out.",
                given=said[name],
                found=value,
            )
    return _checked({**reading.found, **said}, world_size)


def normal(parallelism: Mapping[str, int]) -> dict[str, int]:
    """Return degrees with the usual ones always named, and others only where they are not 1."""
    usual = {name: parallelism.get(name, neutral) for name, neutral in NEUTRAL.items()}
    return usual | {name: value for name, value in sorted(parallelism.items()) if name not in NEUTRAL and value != 1}


def check_kinds(objects: Iterable[object]) -> None:
    """Refuse modules and optimizers that keep their state where nobody can name it.

    Raises:
        UnsupportedError: A DeepSpeed engine, FSDP1, or a ZeroRedundancyOptimizer.
    """
    for each in objects:
        if any(kind.__module__.partition(".")[0] == "deepspeed" for kind in type(each).__mro__):
            raise UnsupportedError(
                f"DeepSpeed's {type(each).__name__} keeps its state in a form of its own.",
                hint="Train with FSDP2 (`torch.distributed.fsdp.fully_shard`), or save with `engine.save_checkpoint`.",
            )
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(each).__mro__):  # its import is slow
            raise UnsupportedError(
                "A ZeroRedundancyOptimizer keeps each rank's share under names of its own.",
                hint="Use FSDP2 (`fully_shard(model, reshard_after_forward=False)`), which shards the same state.",
            )
        if isinstance(each, nn.Module) and any(isinstance(inner, FullyShardedDataParallel) for inner in each.modules()):
            raise UnsupportedError(
                "A module is wrapped in FSDP1 (`FullyShardedDataParallel`), which flattens its parameters.",
                hint="Use FSDP2: `torch.distributed.fsdp.fully_shard`.",
            )


class _Reading:
    """What modules say of themselves."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self.unclear: str | None = None
        """What nobody can tell from the modules alone."""

    def read(self, module: nn.Module) -> None:
        sharding: set[str | None] = set()
        for inner in module.modules():
            if isinstance(inner, DistributedDataParallel):
                self._say("dp", dist.get_world_size(inner.process_group))
            if isinstance(inner, FSDPModule):
                sharding |= self._read_fsdp(inner)
        for mesh in _meshes(module):
            names: Sequence[str | None] = mesh.mesh_dim_names or [None] * mesh.ndim
            for dimension, name in enumerate(names):
                if name in sharding:
                    continue
                if name is None:
                    self.unclear = f"Parameters lie on a mesh of {list(mesh.shape)} whose dimensions have no names"
                else:
                    self._say(_DEGREE_OF.get(name, name), mesh.size(dimension))

    def _read_fsdp(self, module: FSDPModule) -> set[str | None]:
        """Read what FSDP2 does with a module, and return the names of the dimensions that it does it on."""
        state = module._get_fsdp_state()  # noqa: SLF001  (FSDP2 has no public name for its policy)
        names: set[str | None] = set()
        for group in state._fsdp_param_groups:  # noqa: SLF001
            info = group.mesh_info
            names |= set(info.mesh.mesh_dim_names or [None] * info.mesh.ndim)
            self._say("dp", info.mesh.size())
            if info.shard_mesh_dim is not None:
                self._say("fsdp", info.mesh.size(info.shard_mesh_dim))
                # Left to itself, FSDP2 keeps the root's parameters after a forward pass; that is no other policy.
                keeps = group.post_forward_mesh_info is None and not state._auto_reshard_after_forward  # noqa: SLF001
                self.found["zero"] = max(self.found.get("zero", 0), _LAST_STAGE - int(keeps))
        return names

    def _say(self, name: str, value: int) -> None:
        if self.found.setdefault(name, value) != value:
            self.unclear = f"One module says {name}={self.found[name]}, another {name}={value}"


def _meshes(module: nn.Module) -> Iterator[DeviceMesh]:
    """Yield the meshes on which parameters lie, each once."""
    seen: list[DeviceMesh] = []
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh not in seen:
            seen.append(parameter.device_mesh)
    return iter(seen)


def _degree(name: object, value: object) -> int:
    least = 0 if name == "zero" else 1
    if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInputError(f"parallelism: {name!r} cannot be {value!r:.40}.", hint=_SAY, field=str(name))
    return value


def _checked(degrees: Mapping[str, int], ranks: int) -> dict[str, int]:
    known = normal(degrees)
    others = math.prod(value for name, value in known.items() if name != "dp" and name not in NO_RANKS)
    if "dp" not in degrees and ranks % others == 0:
        known["dp"] = ranks // others
    shown = " · ".join(f"{name} {value}" for name, value in known.items() if name not in NO_RANKS)
    if known["dp"] * others != ranks:
        raise InvalidInputError(
            f"{ranks} ranks train, and {shown} make {known['dp'] * others}.", hint=_SAY, ranks=ranks
        )
    if known["dp"] % known["fsdp"] or known["zero"] > _LAST_STAGE:
        raise InvalidInputError(
            f"fsdp {known['fsdp']} and zero {known['zero']} cannot be where dp is {known['dp']}: fsdp divides dp, and "
            f"zero is at most {_LAST_STAGE}.",
            hint=_SAY,
        )
    return known
