import os

# The tensors here are small: waiting for a second thread takes longer than what it does, and several tests may run at once.
# The environment is for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
