"""`examples/train_plain.py` on several ranks, each started with the environment that a launcher gives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from examples import train_plain


def main() -> None:
    """Train; rank 0 writes the last weights."""
    args = train_plain.parse()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model = train_plain.network()
    train_plain.train(args, DistributedDataParallel(model))
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), args.final)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
