"""One torch thread for every test: with two, small tests took ten times as long on a loaded machine."""

import torch

torch.set_num_threads(1)
