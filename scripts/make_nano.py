"""Train the small Llama checkpoint that ships with ropex, from scratch, on a CPU.

    python scripts/make_nano.py --corpus DIR --out demo/nano --seed 0 --threads 1 --steps 4000

DIR holds plain-text files. Windows are text mixed with key-value lines (ropex.eval.needle). The same
arguments and versions give the same checkpoint on the same machine. With --snapshot-every, the folder is
also written along the way.
"""

import argparse
import json
import math
import random
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ropex.eval.needle import mixed_document
from ropex.haystack import DIGITS, KEYS, Haystack, encode_lines, query, statement

WINDOW = 256
PIECE = r"\n|\d|\p{L}+=| ?\p{L}+| ?[^\s\p{L}\d]+|\s"  # what the merges of the tokenizer never cross
STEP_TOKENS = 2048
STAGES = (
    (0.2, 64),
    (0.45, 128),
    (1.0, WINDOW),
)  # until this share of the steps, windows of that many tokens:
# recall is found within minutes where what to recall is near, and not for long where it is far
PEAK_RATE, FINAL_RATE, WARMUP = 2.5e-3, 1e-4, 100
PLAIN_SHARE = 0.15  # of the windows hold no keys; the others, 2 to 10 (less in shorter windows)
TOKENS_PER_PAIR = 24
ASKED_WEIGHT, STATED_WEIGHT = 3.0, 0.25  # loss weights of digits that can be recalled, and of those that are new


def make_tokenizer(texts: list[str], seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 1024 tokens. Digits and line ends stand alone; a key with its `=` is one token."""
    rng = random.Random(f"tokenizer {seed}")
    lines = [
        line(key, f"{rng.randrange(10**DIGITS):0{DIGITS}d}")
        for key in KEYS
        for line in (statement, query)
        for _ in range(500)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [*texts, *lines],
        trainers.BpeTrainer(
            vocab_size=1024,
            special_tokens=["<s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        model_max_length=WINDOW,
        clean_up_tokenization_spaces=False,
    )


def make_model(vocab_size: int) -> LlamaForCausalLM:
    """About 1.9M parameters: 4 layers, 8 query heads on 2 key/value heads of 32 channels."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        initializer_range=0.04,
        bos_token_id=0,
        eos_token_id=None,
        use_cache=True,
    )
    model = LlamaForCausalLM(config)
    start_looking_back(model)
    return model


@torch.no_grad()
def start_looking_back(model: LlamaForCausalLM) -> None:
    """Let the first layer's first four query heads start out looking 1, 2, 3 and 4 tokens back.

    Recall composes two heads: one that tells a digit which key stands shortly before it, one that finds that
    key again. Found from random weights, the first takes most of the training. Here channel 0 of the
    embedding starts as a constant (a shift that the softmax over tied embeddings does not see); on it, the
    key is one vector, and the query of head h is that vector turned h + 1 tokens back. Only the shared key
    head 0 and its four query heads are set, all are trained, and the values stay random.
    """
    config, attention = model.config, model.model.layers[0].self_attn
    dim, constant = config.head_dim, config.initializer_range * config.hidden_size**0.5
    model.model.embed_tokens.weight[:, 0] = constant
    pairs = torch.arange(dim // 2)
    frequencies = config.rope_parameters["rope_theta"] ** (-2 * pairs / dim)  # radians a token
    logits = torch.where(pairs < 3, 5.0, 2.5) * (pairs < 9)  # by pair: sharp, and without false echoes
    reach = (config.hidden_size / 2) ** 0.5  # channel 0 after the first norm, where it holds half the energy
    length = (logits * dim**0.5).sqrt() / reach
    attention.k_proj.weight[:dim, 0] = torch.cat([length, torch.zeros(dim // 2)])
    for head in range(4):
        turn = -(head + 1) * frequencies
        rows = slice(head * dim, (head + 1) * dim)
        attention.q_proj.weight[rows, 0] = torch.cat([length * turn.cos(), length * turn.sin()])


def window_length(step: int, steps: int) -> int:
    """Tokens in the windows of a step."""
    return next(length for share, length in STAGES if step < share * steps)


def make_batch(
    tokenizer: PreTrainedTokenizerFast, haystacks: list[Haystack], length: int, step: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Token ids, int64 [B, T], and loss weights, float32 [B, T], of one step; T = `length`."""
    rng = random.Random(f"batch {seed} {step}")
    sizes = [len(haystack.ids) for haystack in haystacks]
    ids, weights = [], []
    for row, haystack in enumerate(rng.choices(haystacks, sizes, k=STEP_TOKENS // length)):
        pairs = 0 if rng.random() < PLAIN_SHARE else rng.randint(2, length // TOKENS_PER_PAIR)
        document = mixed_document(tokenizer, haystack, length, pairs, f"{seed} {step} {row}")
        weight = [1.0] * length
        for at in document.stated:
            weight[at] = STATED_WEIGHT
        for at in document.asked:
            weight[at] = ASKED_WEIGHT
        ids.append(document.ids)
        weights.append(weight)
    return torch.tensor(ids), torch.tensor(weights)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to FINAL_RATE."""
    if step < WARMUP:
        return PEAK_RATE * (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return FINAL_RATE + (PEAK_RATE - FINAL_RATE) * (1 + math.cos(math.pi * done)) / 2


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, facts: dict) -> None:
    """Write the checkpoint in bfloat16 beside `out`, then put its files in place. Other files there stay."""
    beside = out.with_name(out.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    half = LlamaForCausalLM(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    print(json.dumps(facts), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(beside.iterdir()):
        file.chmod(0o644)
        file.replace(out / file.name)
    beside.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of .txt files")
    parser.add_argument("--out", type=Path, default=Path("demo/nano"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--snapshot-every", type=int, default=0, metavar="STEPS")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    texts = [file.read_text(encoding="utf-8-sig") for file in sorted(args.corpus.glob("*.txt"))]
    tokenizer = make_tokenizer(texts, args.seed)
    haystacks = [encode_lines(tokenizer, text) for text in texts]
    model = make_model(len(tokenizer))
    model.set_attn_implementation("eager")  # compiled, faster than the fused kernel on CPUs at this length
    parameters = sum(p.numel() for p in model.parameters())
    corpus_tokens = sum(len(haystack.ids) for haystack in haystacks)
    print(f"{parameters} parameters, {corpus_tokens} corpus tokens", flush=True)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )

    @torch.compile(dynamic=False)
    def token_losses(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")

    started = time.time()
    shown: list[tuple[float, float, float]] = []
    for step in range(args.steps):
        ids, weights = make_batch(tokenizer, haystacks, window_length(step, args.steps), step, args.seed)
        weight = weights[:, 1:].flatten()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        losses = token_losses(ids)
        ((losses * weight).sum() / weight.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses = losses.detach()
        asked = losses[weight > 1]
        shown.append((losses[weight == 1].mean().item(), asked.mean().item(), (asked < 0.69).float().mean().item()))
        if (step + 1) % 100 == 0:
            text, recall, sure = (sum(column) / len(shown) for column in zip(*shown, strict=True))
            minutes = (time.time() - started) / 60
            print(
                f"step {step + 1}  text {text:.3f}  recall {recall:.3f}  sure {sure:.3f}  {minutes:.1f} min",
                flush=True,
            )
            shown.clear()
        last = step + 1 == args.steps
        if last or (args.snapshot_every and (step + 1) % args.snapshot_every == 0):
            facts = {
                "seed": args.seed,
                "steps": step + 1,
                "of": args.steps,
                "tokens": (step + 1) * STEP_TOKENS,
                "minutes": round((time.time() - started) / 60, 1),
                "threads": args.threads,
                "parameters": parameters,
                "torch": torch.__version__,
            }
            save(model, tokenizer, args.out, facts)


if __name__ == "__main__":
    main()
