"""RMS norms as training needs them: exact in float64, on plain tensors under tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, distribute_module


def set_norms(model: nn.Module, *, exact: bool, mesh: DeviceMesh | None = None) -> None:
    """Replace the forward of every RMS norm where that is needed.

    Args:
        exact: compute in the input's dtype. transformers' round to float32 in between, whatever
            the dtype: then a sum taken in another order, as another world size takes it, is not
            1e-16 but 1e-8 off after a few steps.
        mesh: of tensor parallelism: gains become DTensors on it, whole on each rank, as one
            optimiser takes parameters of one mesh.
    """
    for name, module in model.named_modules():
        if not type(module).__name__.endswith("RMSNorm"):
            continue
        rule = _rms_norm if exact else type(module).forward
        if mesh is not None:
            distribute_module(module, mesh)
            # q_norm and k_norm see this rank's heads only: their gradients are summed over ranks.
            part = name.endswith(("q_norm", "k_norm"))
            module.forward = partial(_on_local, module, rule, Partial() if part else Replicate())
        elif exact:
            module.forward = partial(rule, module)


def _rms_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _on_local(
    norm: Any, rule: Callable[..., torch.Tensor], grads: Placement, x: torch.Tensor
) -> torch.Tensor:
    gain = norm.weight.to_local(grad_placements=[grads])
    return rule(SimpleNamespace(weight=gain, variance_epsilon=norm.variance_epsilon), x)
