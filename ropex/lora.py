"""Merging LoRA: W + scale * B A, summed in float32 and cast once."""

import torch

from ropex.errors import CheckpointError

LORA_A, LORA_B = ".lora_A", ".lora_B"


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W [out, in] plus scale * b [out, r] @ a [r, in] in float32; the caller casts."""
    return weight.float() + scale * (b.float() @ a.float())


def lora_pairs(lora: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """{module name: (A, B)} from `<module>.lora_A` and `<module>.lora_B`; a lone or unknown one is an error."""
    pairs = {}
    left = dict(lora)
    for name in sorted(lora):
        if name.endswith(LORA_A):
            module = name.removesuffix(LORA_A)
            if module + LORA_B not in lora:
                raise CheckpointError(f"{name} has no {LORA_B[1:]} beside it: the run is incomplete")
            pairs[module] = (left.pop(name), left.pop(module + LORA_B))
    if left:
        raise CheckpointError(f"the run holds {sorted(left)[0]}, which is neither rotary nor LoRA")
    return pairs


@torch.no_grad()
def merge_into(model: torch.nn.Module, lora: dict[str, torch.Tensor], scale: float) -> None:
    """Fold LoRA matrices into the weights of a loaded model, in place."""
    for module, (a, b) in lora_pairs(lora).items():
        weight: torch.Tensor = model.get_submodule(module).get_parameter("weight")
        weight.copy_(merged(weight, a.to(weight.device), b.to(weight.device), scale).to(weight.dtype))
