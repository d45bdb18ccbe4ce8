"""A GPU for machines without one: tensors that say they are on the device ``gpu``, with values in the memory of the CPU.

Every operation on them is watched, in the forward and in the backward pass. It is recorded

- as a *wait*, if the program must know values of the device to go on: ``.item()``, ``bool(x)``, a shape that depends on values
  (``nonzero``, ``unique``, a mask as an index), or a copy between the devices;
- as *elsewhere*, if it makes a tensor on another device: ``torch.zeros(n)`` without ``device=``.

Tensors of both devices in one operation are an error, as on a GPU; numbers, which torch keeps on the CPU, may take part. So is
``torch.tensor(numbers, device=...)``, which would copy them, and wait.

Fake CUDA tensors (``FakeTensorMode``) do not do: in a build without CUDA torch cannot index or differentiate them.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
BY_THE_CPU = {aten.linalg_eig, aten._linalg_eigvals}  # torch computes these there, whatever the device
CAN_EMULATE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")  # torch 2.9


class _Hooks(backend_registration._DummyPrivateUse1Hook if CAN_EMULATE else object):
    """For everyone else in this process the device does not exist."""

    def is_available(self) -> bool:
        return False


@cache
def _registered() -> torch.device:
    backend_registration._setup_privateuseone_for_python_backend("gpu", hook=_Hooks())
    return torch.device("gpu:0")


class OnGpu(Tensor):
    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> OnGpu:
        layout = {"strides": on_cpu.stride(), "storage_offset": on_cpu.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, on_cpu.shape, dtype=on_cpu.dtype, device=_registered(), **layout)

    def __init__(self, on_cpu: Tensor) -> None:
        self.on_cpu = on_cpu

    def tolist(self) -> Any:
        """torch refuses it for a subclass; on a GPU, too, it copies the values once."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a tensor of the emulated device, outside of EmulatedGpu")


class EmulatedGpu(TorchDispatchMode):
    """While it is active there is a device ``gpu``.

    >>> with EmulatedGpu() as gpu, torch.device(gpu.device):
    ...     x = torch.ones(2, requires_grad=True)
    ...     gpu.start_over()
    ...     x.square().sum().sqrt().backward()
    ...     gpu.waits.total(), bool(x.grad[0] > 0), gpu.waits
    (0, True, Counter({'_local_scalar_dense': 1}))
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = _registered()
        self.start_over()

    def __enter__(self) -> EmulatedGpu:
        # Autograd starts a thread for each device in the first backward pass of a process, which may have been one on the CPU.
        self.one_thread = torch.autograd.set_multithreading_enabled(False)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.one_thread.__exit__(*error)

    def start_over(self) -> None:
        self.waits: Counter[str] = Counter()
        self.elsewhere: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        at = {x.device.type for x in tensors if x.dim() > 0} or {x.device.type for x in tensors}
        to = _destination(func, args, kwargs, at)
        if len(at) > 1 and func is not aten.copy_.default:
            raise RuntimeError(f"{func} of tensors on {' and '.join(sorted(at))}: {[tuple(x.shape) for x in tensors]}")
        if "gpu" in at | {to} and (len(at | {to}) > 1 or _reads_values(func, args)):
            self.waits[name] += 1
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        out = func(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
        if to != "gpu":
            if "gpu" not in at and any(isinstance(x, Tensor) for x in tree_leaves(out)):
                self.elsewhere[name] += 1
            return out
        return return_and_correct_aliasing(
            func, args, kwargs, tree_map(lambda x: OnGpu(x) if isinstance(x, Tensor) else x, out)
        )


def _destination(func: Any, args: Any, kwargs: Any, at: set[str]) -> str:
    """The device of what the operation makes."""
    if func is aten.copy_.default:
        return args[0].device.type
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type
    return "gpu" if "gpu" in at else "cpu"


def _reads_values(func: Any, args: Any) -> bool:
    """Whether the program must know values of tensors before it can go on."""
    if func.overloadpacket in INDEXING:  # tagged because of masks; an index of integers does not wait
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return func.overloadpacket in BY_THE_CPU or bool(WAITING_TAGS.intersection(func.tags))


def _on_cpu(x: Any) -> Any:
    return x.on_cpu if isinstance(x, OnGpu) else x
