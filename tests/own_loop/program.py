"""A program with a loop of its own, as a user starts it: `python program.py --out FOLDER`."""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import exact_run

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--lr", type=float, default=0.1)
options = parser.parse_args()

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
loader = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with exact_run(
    accelerator, options.out, model=model, optimizer=optimizer, loader=loader, digest_every=2
) as run:
    for _ in run.epochs(2):
        for (inputs,) in run.batches():
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.log("loss", loss)
        run.row(last=float(loss.detach()))
