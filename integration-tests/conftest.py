"""Settings of all integration tests."""

import torch

torch.set_num_threads(1)  # the models are so small that a second thread only costs
