"""A model that DeepSpeed's ZeRO-3 holds: clipping, state and whole weights, in our terms.

DeepSpeed keeps of each parameter one flat run a rank, in the dtype of the matmuls; of each
parameter group a flat master copy in float32, which the optimiser updates. It reduces gradients
after every micro-batch into flat float32 shards. It is imported only where a run asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybrid.training.flat_piece import FlatPiece

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's, kept flat like the master copy."""


class ZeroModel(nn.Module):
    """Called like the model itself; `backward` of what it returns reduces gradients too.

    Args:
        engine: DeepSpeed's, of ZeRO stage 3 with torch's AdamW.
        groups: names of the parameters of each group of the optimiser.
    """

    def __init__(self, engine: Any, groups: list[list[str]]) -> None:
        super().__init__()
        self.module: nn.Module = engine.module
        # Not as a module within, which it would be as well: of the same parameters.
        self.__dict__["_engine"] = engine
        self._groups = groups

    @property
    def optimizer(self) -> Any:
        """With `param_groups`, `step` and `zero_grad` like one of torch's."""
        return self.__dict__["_engine"].optimizer

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """What the model returns."""
        return self.__dict__["_engine"](*args, **inputs)

    @torch.no_grad()
    def clip_gradients(self, limit: float) -> torch.Tensor:
        """What `optimizer.clip_gradients` does. Once a step, after its last backward pass.

        Padding of the shards is zero and does not count.
        """
        shards = [g for group in self.optimizer.averaged_gradients.values() for g in group]
        squares = torch.stack(torch._foreach_norm(shards)).double().square().sum()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        scale = (limit / (norm + 1e-6)).clamp(max=1.0).to(shards[0].dtype)
        torch._foreach_mul_(shards, scale)
        return norm

    def core(self) -> dict[str, Any]:
        """Model and optimiser as `torch.distributed.checkpoint.state_dict` would give them.

        Tensors are pieces of the live ones but for the optimiser's step counts.
        """
        self._make_moments()
        weights, states = {}, {}
        for name, parameter in self._parameters_by_name():
            master = self._master(parameter)
            weights[name] = self._piece(parameter, master)
            state = self.optimizer.state[master]
            states[name] = {
                "step": state["step"].clone(),
                **{key: self._piece(parameter, state[key]) for key in _MOMENTS},
            }
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": list(names)}
            for group, names in zip(self.optimizer.param_groups, self._groups, strict=True)
        ]
        return {
            "model": {**weights, **self._buffers_by_name()},
            "optimizer": {"state": states, "param_groups": groups},
        }

    def loaded(self, core: dict[str, Any]) -> None:
        """Go on from what was loaded into `core()`, in place."""
        for name, parameter in self._parameters_by_name():
            state = self.optimizer.state[self._master(parameter)]
            state["step"].copy_(core["optimizer"]["state"][name]["step"])
        self.masters_changed()

    @torch.no_grad()
    def masters_changed(self) -> None:
        """Give the master copy to what is computed with, as DeepSpeed does after each update."""
        optimizer = self.optimizer
        optimizer._partition_all_parameters()
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def full_state(self, rank: int) -> dict[str, torch.Tensor]:
        """The whole float32 state dict on the CPU, on rank 0; elsewhere it is empty. Collective."""
        found: dict[str, torch.Tensor] = {}
        whole: dict[int, torch.Tensor] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if id(parameter) not in whole:  # the same order on all ranks
                full = self.optimizer.get_full_hp_param(parameter)
                whole[id(parameter)] = full.cpu() if rank == 0 else full.new_empty(0)
            if rank == 0:
                found[name] = whole[id(parameter)]
        if rank == 0:
            found |= {name: buffer.cpu() for name, buffer in self._buffers_by_name().items()}
        return found

    def pieces(self) -> Iterator[tuple[str, FlatPiece]]:
        """This rank's run of each parameter's master copy, by name."""
        for name, parameter in self._parameters_by_name():
            yield name, self._piece(parameter, self._master(parameter))

    def _parameters_by_name(self) -> Iterator[tuple[str, Any]]:
        """Each once: a tied one under its first name."""
        return iter(self.module.named_parameters())

    def _buffers_by_name(self) -> dict[str, torch.Tensor]:
        """Those that belong in a checkpoint."""
        parameters = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        state = self.module.state_dict()
        return {name: tensor for name, tensor in state.items() if name not in parameters}

    def _master(self, parameter: Any) -> torch.Tensor:
        """The flat master copy of the group that a parameter is in."""
        index = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)][0]
        master: torch.Tensor = self.optimizer.fp32_partitioned_groups_flat[index]
        return master

    def _piece(self, parameter: Any, flat: torch.Tensor) -> FlatPiece:
        """This rank's run of a parameter, or of a moment of it, where it lies in `flat`."""
        optimizer = self.optimizer
        _, at, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = min(dist.get_rank() * length, parameter.ds_numel)
        count = min(length, parameter.ds_numel - start)  # the last ranks' runs are padded
        return FlatPiece(flat.detach().narrow(0, at, count), parameter.ds_shape, start)

    def _make_moments(self) -> None:
        """As AdamW itself does in its first step."""
        for index, master in enumerate(self.optimizer.fp32_partitioned_groups_flat):
            state = self.optimizer.state[master]
            if not state:
                group = self.optimizer.sub_group_to_group_id[index]
                fused = self.optimizer.param_groups[group]["fused"]
                device = master.device if fused else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                for key in _MOMENTS:
                    state[key] = torch.zeros_like(master, requires_grad=False)
