import json
import shutil

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from sources import built
from tolerances import LOGITS
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from ropex.convert.adapter import with_adapter
from ropex.convert.read_bin import read_bin
from ropex.convert.source import every, open_source
from ropex.errors import CheckpointError, UnsupportedError

EXACT = 1e-6
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def train(base, folder, config, seed: int = 3, **saved):
    """An adapter whose trainable values were all moved, as PEFT saves it."""
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    peft.save_pretrained(folder, **saved)
    return folder


def live(base, adapter):
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()


def edit(adapter, change=None, **settings):
    """Rewrite an adapter's settings, or its tensors by change(dict)."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    tensors = load_file(adapter / "adapter_model.safetensors")
    if change:
        change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")
    return adapter


@pytest.fixture
def adapter(folder, tmp_path):
    return train(folder, tmp_path / "adapter", LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))


VARIANTS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 8, "layers.1.self_attn.k_proj": 2},
        "alpha_pattern": {r"layers\.[01]\.mlp\.up_proj": 3, "o_proj": 64},
    },
    "rslora with patterns": {"use_rslora": True, "rank_pattern": {"k_proj": 16}, "alpha_pattern": {"v_proj": 1}},
    "saved modules": {"modules_to_save": ["norm", "input_layernorm"]},
    "words": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "words with dora": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_tensors_are_pefts_own(folder, tmp_path, variant):
    """RX-25: every variant, in float32."""
    config = LoraConfig(**({"r": 4, "lora_alpha": 12, "target_modules": PROJECTIONS} | VARIANTS[variant]))
    adapter = train(folder, tmp_path / "adapter", config)
    source, tally = with_adapter(open_source(folder), adapter)
    theirs = live(folder, adapter).merge_and_unload().state_dict()
    base = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    ours = dict(source.tensors(every))
    assert ours.keys() == theirs.keys()
    assert max((ours[n] - theirs[n]).abs().max() for n in ours) <= EXACT
    moved = sum(not torch.equal(theirs[n], base[n]) for n in base)
    assert tally["merged"] + tally["replaced"] == moved > 0
    assert tally["adapter_tensors"] == len(load_file(adapter / "adapter_model.safetensors"))


def test_a_merged_model_answers_as_the_live_adapter_does(folder, tmp_path, adapter, tokens):
    """RX-25."""
    source, tally = with_adapter(open_source(folder), adapter)
    assert tally == {"adapter_tensors": 12, "merged": 6, "replaced": 0}
    again = built(source, tmp_path / "out")(tokens).logits
    assert (again - live(folder, adapter)(tokens).logits).abs().max() <= LOGITS
    assert (again - AutoModelForCausalLM.from_pretrained(folder)(tokens).logits).abs().max() > 0.1


def test_the_sum_is_formed_in_float32_and_cast_once(tmp_path, model):
    """RX-25: with an adapter in either dtype, on a base in bfloat16."""
    base = tmp_path / "bf16"
    model.bfloat16().save_pretrained(base)
    adapter = train(base, tmp_path / "adapter", LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    for dtype in (torch.float32, torch.bfloat16):
        edit(adapter, lambda tensors, dtype=dtype: tensors.update({n: t.to(dtype) for n, t in tensors.items()}))
        raw = load_file(adapter / "adapter_model.safetensors")
        name = "model.layers.1.self_attn.q_proj"
        a, b = (raw[f"base_model.model.{name}.lora_{x}.weight"].float() for x in "AB")
        expected = (load_file(base / "model.safetensors")[f"{name}.weight"].float() + 2.0 * (b @ a)).bfloat16()
        merged = dict(with_adapter(open_source(base), adapter)[0].tensors(every))
        assert torch.equal(merged[f"{name}.weight"], expected)


def test_a_saved_module_is_cast_to_the_dtype_of_the_tensor_it_replaces(tmp_path, model):
    base = tmp_path / "bf16"
    model.bfloat16().save_pretrained(base)
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    adapter = edit(train(base, tmp_path / "adapter", config), lambda t: t.update({n: x.float() for n, x in t.items()}))
    assert {t.dtype for _, t in with_adapter(open_source(base), adapter)[0].tensors(every)} == {torch.bfloat16}


def test_trained_biases_take_their_place(tmp_path, make_model):
    base = tmp_path / "base"
    make_model(attention_bias=True).save_pretrained(base)
    config = LoraConfig(r=4, target_modules=["q_proj"], bias="all")
    adapter = train(base, tmp_path / "adapter", config)
    theirs = live(base, adapter).merge_and_unload().state_dict()
    ours = dict(with_adapter(open_source(base), adapter)[0].tensors(every))
    assert max((ours[n] - theirs[n]).abs().max() for n in theirs) <= EXACT


def test_a_bias_in_the_adapter_is_added_where_the_base_has_one(folder, tmp_path, make_model):
    base = tmp_path / "base"
    make_model(attention_bias=True).save_pretrained(base)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["k_proj"], lora_bias=True)
    adapter = train(base, tmp_path / "adapter", config)
    theirs = live(base, adapter).merge_and_unload().state_dict()
    ours = dict(with_adapter(open_source(base), adapter)[0].tensors(every))
    assert max((ours[n] - theirs[n]).abs().max() for n in theirs) <= EXACT
    with pytest.raises(UnsupportedError, match=r"lora_B\.bias changes .*k_proj\.bias, which .* does not have"):
        with_adapter(open_source(folder), adapter)


TIED = {
    "words by lora": ({"target_modules": ["embed_tokens"]}, False),
    "words by lora, kept tied": ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, True),
    "words saved": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
    "words saved, kept tied": (
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True,
    ),
    "both saved": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, False),
    "head saved": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
    "head by lora": ({"target_modules": ["lm_head"]}, False),
    "both by lora": ({"target_modules": ["embed_tokens", "lm_head"]}, False),
    "neither": ({"target_modules": ["q_proj"]}, True),
}  # fmt: skip


@pytest.mark.parametrize("case", TIED)
def test_trained_words_or_heads_are_untied_where_they_come_to_differ(tmp_path, make_model, tokens, case):
    """RX-30: the live adapter is what was trained. PEFT's own merge adds either delta to the shared tensor."""
    base = tmp_path / "base"
    make_model(tie_word_embeddings=True).save_pretrained(base)
    settings, tied = TIED[case]
    adapter = train(base, tmp_path / "adapter", LoraConfig(r=4, lora_alpha=4, **settings))
    source, _ = with_adapter(open_source(base), adapter)
    assert source.config["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in dict(source.tensors(every))) is not tied
    head = dict(source.tensors(lambda name: name == "lm_head.weight"))
    assert len(head) == (not tied)
    again = built(source, tmp_path / "out")(tokens).logits
    assert (again - live(base, adapter)(tokens).logits).abs().max() <= LOGITS


def test_one_delta_at_two_scales_is_two_tensors(tmp_path, make_model):
    base = tmp_path / "base"
    make_model(tie_word_embeddings=True).save_pretrained(base)
    config = LoraConfig(r=4, lora_alpha=4, target_modules=["embed_tokens"], ensure_weight_tying=True)
    adapter = train(base, tmp_path / "adapter", config)
    source, _ = with_adapter(open_source(base), edit(adapter, alpha_pattern={"lm_head": 8}))
    read = dict(source.tensors(every))
    assert not source.config["tie_word_embeddings"]
    assert not torch.equal(read["lm_head.weight"], read["model.embed_tokens.weight"])


def test_a_stored_head_that_the_config_overrules_is_not_what_the_adapter_changes(tmp_path, make_model, tokens):
    """RX-30: a checkpoint that stores the head anyway."""
    base = tmp_path / "base"
    model = make_model(tie_word_embeddings=True)
    model.save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(97, 64)}, base / "model.safetensors", {"format": "pt"})
    adapter = train(base, tmp_path / "adapter", LoraConfig(r=4, target_modules=["embed_tokens"]))
    merged = list(with_adapter(open_source(base), adapter)[0].tensors(every))
    assert len(merged) == len(dict(merged))
    assert torch.equal(dict(merged)["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_adapters_add_up(folder, tmp_path, adapter):
    other = train(folder, tmp_path / "other", LoraConfig(r=2, target_modules=["q_proj"]), seed=8)
    once = with_adapter(open_source(folder), adapter)[0]
    both = dict(with_adapter(once, other)[0].tensors(every))
    step = live(folder, adapter).merge_and_unload()
    step.save_pretrained(tmp_path / "step")
    theirs = live(tmp_path / "step", other).merge_and_unload().state_dict()
    assert max((both[n] - theirs[n]).abs().max() for n in theirs) <= EXACT


def test_only_wanted_tensors_are_read_and_the_base_is_left_alone(folder, adapter):
    before = (folder / "model.safetensors").read_bytes()
    source, _ = with_adapter(open_source(folder), adapter)
    assert [n for n, _ in source.tensors(lambda n: n.endswith("2.mlp.down_proj.weight"))] == [
        "model.layers.2.mlp.down_proj.weight"
    ]
    assert source.checkpoint is None and (folder / "model.safetensors").read_bytes() == before


def test_a_bin_adapter_on_a_bin_base_is_the_same(folder, tmp_path, model, adapter):
    expected = dict(with_adapter(open_source(folder), adapter)[0].tensors(every))
    base, old = tmp_path / "bin", tmp_path / "old"
    shutil.copytree(folder, base)
    shutil.copytree(adapter, old)
    torch.save(model.state_dict(), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    raw = load_file(adapter / "adapter_model.safetensors")
    torch.save({n.replace("lora_A.", "lora_A.default."): t for n, t in raw.items()}, old / "adapter_model.bin")
    (old / "adapter_model.safetensors").unlink()
    found = dict(with_adapter(read_bin(base), old)[0].tensors(every))
    assert all(torch.equal(found[n], t) for n, t in expected.items())


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight",
        "base_model.model.model.layers.0.mlp.experts.lora_A.weight",
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
        "model.layers.0.self_attn.sinks",
    ],
)
def test_a_tensor_that_has_no_place_in_the_base_is_refused_by_name(folder, adapter, name):
    """RX-29: nothing is dropped."""
    edit(adapter, lambda tensors: tensors.update({name: torch.zeros(4, 64)}))
    with pytest.raises(UnsupportedError) as raised:
        with_adapter(open_source(folder), adapter)
    assert name in str(raised.value)


def mixtral(path):
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=16, num_hidden_layers=2, vocab_size=97,
        intermediate_size=32, num_local_experts=4, max_position_embeddings=128,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(path)
    return path


def test_lora_on_attention_leaves_every_expert_and_router_alone(tmp_path):
    """RX-29."""
    base = mixtral(tmp_path / "moe")
    adapter = train(base, tmp_path / "adapter", LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    source, tally = with_adapter(open_source(base), adapter)
    stored, merged = load_file(base / "model.safetensors"), dict(source.tensors(every))
    changed = {n for n, t in merged.items() if not torch.equal(t, stored[n])}
    assert merged.keys() == stored.keys() and tally["merged"] == len(changed) == 4
    assert all(".self_attn." in n for n in changed)


def test_lora_on_fused_experts_is_refused(tmp_path):
    """RX-29: transformers 5 fuses experts in memory and saves them one by one."""
    base = mixtral(tmp_path / "moe")
    config = LoraConfig(r=4, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    adapter = train(base, tmp_path / "adapter", config)
    with pytest.raises(UnsupportedError, match="experts.*which .* does not have"):
        with_adapter(open_source(base), adapter)


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    ],
)
def test_other_kinds_of_adapters_are_refused_by_name(folder, tmp_path, config):
    adapter = train(folder, tmp_path / "adapter", config)
    with pytest.raises(UnsupportedError, match="IA3|PROMPT_TUNING"):
        with_adapter(open_source(folder), adapter)


@pytest.mark.parametrize(
    "settings",
    [
        {"fan_in_fan_out": True},
        {"alora_invocation_tokens": [1, 2]},
        {"layer_replication": [[0, 2], [1, 3]]},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
    ],
)
def test_settings_that_change_the_sum_are_refused_by_name(folder, adapter, settings):
    with pytest.raises(UnsupportedError, match=next(iter(settings))):
        with_adapter(open_source(folder), edit(adapter, **settings))


Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (lambda t: t.pop(f"{Q0}.lora_B.weight"), {}, "has a alone"),
        (lambda t: t.update({f"{Q0}.lora_A.default.weight": torch.ones(4, 64)}), {}, "twice"),
        (lambda t: t.update({f"{Q0}.lora_magnitude_vector": torch.ones(128)}), {}, "use_dora is False"),
        (None, {"use_dora": True}, "has no lora_magnitude_vector"),
        (None, {"modules_to_save": ["lm_head"]}, "lm_head in modules_to_save"),
        (lambda t: t.clear(), {}, "no tensors"),
    ],
)
def test_a_half_adapter_is_refused_before_anything_is_read(folder, adapter, change, settings, message):
    with pytest.raises(CheckpointError, match=message):
        with_adapter(open_source(folder), edit(adapter, change, **settings))


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (lambda t: t.update({f"{Q0}.lora_B.weight": torch.ones(64, 4)}), {}),
        (lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(4, 32)}), {}),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(99, 64)}), {}),
        (None, {"r": 8}),
        (None, {"r": 0}),
    ],
)
def test_a_tensor_that_does_not_fit_the_base_is_refused(folder, adapter, change, settings):
    source, _ = with_adapter(open_source(folder), edit(adapter, change, **settings))
    with pytest.raises(CheckpointError, match="another base|save the adapter again"):
        list(source.tensors(every))


def test_a_folder_that_is_no_adapter_is_named(folder, adapter):
    with pytest.raises(CheckpointError, match="no adapter_config.json"):
        with_adapter(open_source(folder), folder)
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        with_adapter(open_source(folder), adapter)
    file.unlink()
    with pytest.raises(CheckpointError, match="no adapter_model.safetensors"):
        with_adapter(open_source(folder), adapter)
