"""A script that spawns its workers and its data loader's, which run it again from its top."""

import os

import amp_C
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from apex import amp
from apex.parallel import DistributedDataParallel as DDP

assert amp_C.multi_tensor_scale


class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((4,), float(i)), torch.tensor(float(i))


def main_worker(rank, world, port):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:%d" % port, rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    model = DDP(model)
    dataset = Dataset()
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, shuffle=False)
    loader = torch.utils.data.DataLoader(
        dataset, 4, sampler=sampler, num_workers=1, multiprocessing_context="spawn"
    )
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - y).pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    weights = [torch.zeros(1, 4) for _ in range(world)]
    dist.all_gather(weights, next(amp.master_params(optimizer)).detach())
    if rank == 0:
        print("same", torch.equal(weights[0], weights[1]), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may let go of a tensor after Python has ended: pytorch/pytorch#179291


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(main_worker, nprocs=2, args=(2, port))
