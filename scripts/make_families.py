"""Print docs/families.md: the architectures that ropex knows, from its own registry.

python scripts/make_families.py > docs/families.md
"""

from ropex.families import FAMILIES, Family

HEAD = """# Families

The architectures that ropex converts, by the `model_type` of their config.json. Each is held to a tiny random
transformers model of its own (`tests/families.py`): a fresh AdaRoPE gives the parent's logits exactly, cached decoding
equals the full forward, exports reload, and permuting to the other pairing and back is bit-exact.

| model_type | pairing its code runs | turning channels | projections | norms of q and k | layers that turn |
|---|---|---|---|---|---|"""

TAIL = """
Refused by name, with the reason: compressed keys (MLA, such as deepseek_v3), encoders, rope in sections (multimodal),
wrappers around a language model, and quantised weights where rows would have to be permuted.

Partial rotary: where a family turns a part of each head, "half" in rope-id and half-rope is half of that part, and
the other channels stay at rest. Where a family has norms between projection and rotation, their weights are permuted
with the rows. A scale that is folded into q goes into that norm, since the norm would undo it in the projection."""


def row(family: Family) -> str:
    turning = "all" if family.partial is None else f"partial_rotary_factor, {family.partial:g} where unsaid"
    projections = ", ".join(family.projections)
    if family.fused:
        projections += f" ({'q, k, v of a head together' if family.order == 'per head' else 'q, then k, then v'})"
    if family.gated:
        projections += " (a head's query, then its gate)"
    norms = f"{family.q_norm}, {family.k_norm}" if family.q_norm else "none"
    if family.norm_flag:
        norms += f" (if {family.norm_flag})"
    layers = "all"
    if family.two_tables:
        layers = "full attention; sliding layers have their own table (--sliding-layers)"
    elif family.rotating == "no_rope_layers":
        layers = "those that no_rope_layers marks 1"
    elif family.rotating:
        layers = family.rotating.replace("_", " ")
    return f"| {family.model_type} | {family.pairing} | {turning} | {projections} | {norms} | {layers} |"


def page() -> str:
    return "\n".join([HEAD, *map(row, FAMILIES.values()), TAIL])


if __name__ == "__main__":
    print(page())
