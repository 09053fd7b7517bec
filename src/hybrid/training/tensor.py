"""Tensor parallelism for Llama's kin: which matrix is cut which way, over a one-dimensional mesh.

Columns of q, k, v, gate and up, rows of o and down, the vocabulary of embedding and head (Shoeybi
et al. 2019): one all-reduce after attention, one after the MLP, forward and backward each. What is
in between, the residual stream, is whole and equal on all ranks of the mesh; so are random numbers
drawn there, as these ranks compute the same micro-batches from the same seeds.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)


def share_matrices(model: Any, mesh: DeviceMesh) -> None:
    """Cut the model's matrices over `mesh` in place; `norms.set_norms` does the gains.

    Args:
        model: a causal LM of one of `rules.TENSOR_FAMILIES`; heads and key-value heads are
            multiples of the mesh's size (see `rules.check_strategy`).
    """
    decoder = model.get_decoder()
    tied = model.get_output_embeddings().weight is decoder.embed_tokens.weight
    whole = Replicate()
    # Attention and MLP take their input in once: its gradient is then summed once, not for each of
    # q, k and v.
    block = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        **{f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
        "self_attn.o_proj": RowwiseParallel(),
        "mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in decoder.layers:
        parallelize_module(layer, mesh, block)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=whole)})
    parallelize_module(decoder, mesh, {"embed_tokens": RowwiseParallel(input_layouts=whole)})
    if tied:
        model.get_output_embeddings().weight = decoder.embed_tokens.weight
