"""A tiny model with random weights for every family: 8 query and 2 key/value heads of 16 channels, biases and norm
weights that are not the library's ones and zeros, a theta that is nobody's default."""

import torch
import transformers
from transformers import PreTrainedModel

from ropex.families import FAMILIES

THETA, WINDOW, VOCAB = 500_000.0, 128, 97
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_OWN: dict[str, dict] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": _MOE | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": _MOE,
    "qwen3_next": _MOE
    | {
        "num_hidden_layers": 4, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "decoder_sparse_step": 1,
    },
    "gemma2": {"num_hidden_layers": 2, "query_pre_attn_scalar": 16, "sliding_window": 64},
    "gemma3_text": {
        "num_hidden_layers": 6, "query_pre_attn_scalar": 16, "sliding_window": 64,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": THETA, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
        },
    },
    "olmo": {"attention_bias": True},
    "olmo3": {
        "num_hidden_layers": 4, "sliding_window": 64,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": THETA},
            "sliding_attention": {"rope_type": "default", "rope_theta": THETA},
        },
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 128},
    "phi": {"hidden_size": 128, "qk_layernorm": True},
    "phi3": {"pad_token_id": 0, "hidden_size": 128},
    "stablelm": {"hidden_size": 128, "use_qkv_bias": True, "qk_layernorm": True},
    "glm": {"pad_token_id": 0},
    "glm4": {"pad_token_id": 0},
    "gpt_neox": {"hidden_size": 128},
    "cohere": {"use_qk_norm": True, "hidden_size": 128},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 64, "hidden_size": 128},
    "smollm3": {"num_hidden_layers": 4, "pad_token_id": 0},
    "starcoder2": {"use_bias": True, "hidden_size": 128, "sliding_window": None},
    "granite": {"attention_multiplier": 0.25, "attention_bias": True},
}  # fmt: skip


def tiny(model_type: str, seed: int = 0, **changes) -> PreTrainedModel:
    family = FAMILIES[model_type]
    config_class = getattr(transformers, family.config_name)
    settings = {
        "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3,
        "vocab_size": VOCAB, "intermediate_size": 96, "max_position_embeddings": WINDOW, "bos_token_id": 1,
        "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    }  # fmt: skip
    settings |= _OWN.get(model_type, {})
    if settings["hidden_size"] == 128:
        settings.pop("head_dim")
    if family.partial not in (None, 1.0):
        settings["rope_parameters"]["partial_rotary_factor"] = 0.5
    torch.manual_seed(seed)
    model = getattr(transformers, family.causal_lm)(config_class(**settings | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25 if parameter.ndim > 1 else 0.5)
    return model
