"""How numbers were computed: recorded with a run, and compared before it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


def recorded(modules: Sequence[nn.Module], given: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what is known of the precision of a training, as text by name.

    Args:
        modules: Whose FSDP policies count.
        given: What torch cannot be asked, such as the dtype of autocast.
    """
    policies = {_policy(each) for root in modules for each in root.modules() if isinstance(each, FSDPModule)}
    found = {
        "default_dtype": str(torch.get_default_dtype()),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "cudnn_tf32": str(torch.backends.cudnn.allow_tf32),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "fsdp": "; ".join(sorted(str(each) for each in policies - {None, MixedPrecisionPolicy()})),
    }
    return found | {name: str(value) for name, value in (given or {}).items()}


def _policy(module: FSDPModule) -> MixedPrecisionPolicy | None:
    group = module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001  (FSDP2 has no public name for it)
    return None if group is None else group.mp_policy
