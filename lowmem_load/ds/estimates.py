"""DeepSpeed's own estimate of what training under ZeRO-3 needs. Part of the DeepSpeed seam."""

from __future__ import annotations

from lowmem_load.contract import DEEPSPEED, require

_STAGE3 = "deepspeed.runtime.zero.stage3"


def model_states(
    num_elements: int,
    largest_layer: int,
    *,
    gpus_per_node: int,
    num_nodes: float,
    offloads_optimizer: bool,
    offloads_parameters: bool,
) -> tuple[int, int]:
    """Return the bytes of host memory of a node, and of device memory of a GPU, that DeepSpeed's estimator gives.

    It counts parameters, gradients and the states of Adam in mixed precision, 18 bytes for each parameter, on the host
    1.5 times that, and on the device the largest layer whole; no activations.

    Args:
        num_elements: of all parameters.
        largest_layer: elements of the module with the most parameters of its own.
        gpus_per_node: ranks of a node.
        num_nodes: of the job; it only divides by them, so 1.5 is for a last node that is half full.
        offloads_optimizer: whether optimizer states stay on the host.
        offloads_parameters: whether parameters do as well.

    Source: deepspeed 0.19.8 `runtime/zero/stage3.py`, `estimate_zero3_model_states_mem_needs`.
    """
    require(
        DEEPSPEED,
        {_STAGE3: ("estimate_zero3_model_states_mem_needs",)},
        arguments={
            f"{_STAGE3}:estimate_zero3_model_states_mem_needs": (
                *("total_params", "largest_layer_params", "num_gpus_per_node", "num_nodes"),
                *("cpu_offload", "cpu_offload_params", "zero_init"),
            )
        },
    )
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    host, device, _ = estimate_zero3_model_states_mem_needs(
        num_elements,
        largest_layer,
        num_gpus_per_node=gpus_per_node,
        num_nodes=num_nodes,
        cpu_offload=offloads_optimizer,
        cpu_offload_params=offloads_parameters,
        zero_init=True,
    )
    return int(host), int(device)
