"""A plain PyTorch loop that survives running out of memory; here on an emulated GPU of 12 MiB."""

import logging

import torch

import foxray

logging.basicConfig(format="%(message)s")
torch.manual_seed(0)
x, y = torch.randn(4096, 32), torch.randn(4096)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=512, shuffle=True)

with foxray.memory_budget(12 << 20):
    model = torch.nn.Sequential(torch.nn.Linear(32, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = foxray.recover(optimizer, max_grad_norm=1.0)
    for batch in loader:
        result = step(batch, lambda part: torch.nn.functional.mse_loss(model(part[0]).squeeze(1), part[1]))
    print(f"loss {result.loss:.3f}, samples {result.samples}, computed {step.batch_size} at a time")
