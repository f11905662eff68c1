"""A script that spawns its workers and its data loader's, which run it again from its top."""

import amp_C
import torch
import torch.multiprocessing as mp
import torch.nn as nn
from apex import amp

assert amp_C.multi_tensor_scale


class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((4,), float(i)), torch.tensor(float(i))


def main_worker(rank):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    loader = torch.utils.data.DataLoader(Dataset(), 4, num_workers=1, multiprocessing_context="spawn")
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - y).pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    if rank == 0:
        print("trained", flush=True)


if __name__ == "__main__":
    mp.spawn(main_worker, nprocs=2)
