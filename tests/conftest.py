import torch

# The tensors here are small: waiting for a second thread takes longer than what it does.
torch.set_num_threads(1)
