"""A GAN of 2019: two models, two optimizers, three losses with a scale of their own."""

import torch
import torch.nn as nn
from apex import amp

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
criterion = nn.BCEWithLogitsLoss()
optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
[critic, generator], [optimizer_d, optimizer_g] = amp.initialize(
    [critic, generator], [optimizer_d, optimizer_g], opt_level="O1", num_losses=3, verbosity=0
)
for i in range(6):
    critic.zero_grad()
    real, noise = torch.randn(16, 2) + 3, torch.randn(16, 4)
    output = critic(real)
    error_real = criterion(output, torch.ones(16, 1))
    with amp.scale_loss(error_real, optimizer_d, loss_id=0) as scaled:
        scaled.backward()
    fake = generator(noise)
    error_fake = criterion(critic(fake.detach()), torch.zeros(16, 1))
    with amp.scale_loss(error_fake, optimizer_d, 1) as scaled:
        scaled.backward()
    optimizer_d.step()
    generator.zero_grad()
    error = criterion(critic(fake), torch.ones(16, 1))
    with amp.scale_loss(error, optimizer_g, loss_id=2) as scaled:
        scaled.backward()
    optimizer_g.step()
print(sorted(amp.state_dict()), "%.4f" % (error_real + error_fake).item())
