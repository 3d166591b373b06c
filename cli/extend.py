"""ropex extend"""

from pathlib import Path
from typing import Annotated

import typer

from ropex.cli.common import fail, length, print_json, settings, stdout


def extend(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint folder, a .gguf file, a Hub id, a run, or 'nano'.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The run's folder.")],
    target: Annotated[str, typer.Option(help="The window wanted, such as 16k.")],
    data: Annotated[
        list[str], typer.Option(help=".txt, .md, .jsonl, .parquet, a folder, or a Hub dataset; may be repeated.")
    ],
    strategy: Annotated[
        str, typer.Option(help="What is trained when: warmup-joint, warmup-lora, warmup, joint, lora or full.")
    ] = "warmup-joint",
    to: Annotated[
        str, typer.Option(help="The method that an unconverted SRC gets; all but adarope train LoRA or full.")
    ] = "adarope",
    tunables: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A tunable of the method; may be repeated.")
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="Tokens a training window; below the target, positions skip. [default: target]")
    ] = None,
    pack: Annotated[
        bool, typer.Option("--pack", help="Fill a window with short documents that do not see each other.")
    ] = False,
    steps_warmup: Annotated[int, typer.Option(help="Steps of the warm-up: rotary parameters alone.")] = 40,
    steps_joint: Annotated[int, typer.Option(help="Steps of the stage after it, or of the only one.")] = 60,
    batch_size: Annotated[int, typer.Option(help="Windows a forward pass.")] = 1,
    accumulation: Annotated[int, typer.Option(help="Forward passes a step.")] = 1,
    lr_freq: Annotated[float, typer.Option(help="Learning rate of delta (frequencies).")] = 1e-3,
    lr_scale: Annotated[float, typer.Option(help="Learning rate of tau and gamma (scale).")] = 1e-2,
    lr_lora: Annotated[float, typer.Option(help="Learning rate of LoRA.")] = 2e-4,
    lr_full: Annotated[float, typer.Option(help="Learning rate of all weights, with --strategy full.")] = 5e-5,
    init: Annotated[str, typer.Option(help="The method that the heads start from.")] = "yarn",
    no_adafreq: Annotated[bool, typer.Option("--no-adafreq", help="Leave the frequencies as they start.")] = False,
    no_adascale: Annotated[bool, typer.Option("--no-adascale", help="Leave the attention scale as it starts.")] = False,
    share_heads: Annotated[bool, typer.Option("--share-heads", help="One table and scale for all heads.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Backbone in float32 or bfloat16. [default: as stored]")] = None,
    grad_ckpt: Annotated[
        bool | None, typer.Option("--grad-ckpt/--no-grad-ckpt", help="Recompute activations. [default: from 4k]")
    ] = None,
    save_steps: Annotated[int | None, typer.Option(help="Steps between checkpoints. [default: ten a stage]")] = None,
    seed: Annotated[int, typer.Option(help="Windows, their order and LoRA's start follow from this.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that ropex wrote.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Train the extension: rotary parameters first, then rotary parameters and LoRA together.

    [bold]Examples[/bold]
      ropex extend ./SmolLM2-135M -o run --target 16k --data books/ --window 2048
      ropex extend ./SmolLM2-135M -o run --target 16k --data books/ --window 2048 --resume
      ropex extend ./SmolLM2-135M -o healed --target 16k --data books/ --to rope-id --strategy full --dtype float32
    """
    tokens, pieces = length(target), length(window) if window else None
    from ropex.train.extend import extend as run

    result = run(
        source,
        out,
        target=tokens,
        data=data,
        strategy=strategy,
        window=pieces,
        pack=pack,
        steps_warmup=steps_warmup,
        steps_joint=steps_joint,
        batch_size=batch_size,
        accumulation=accumulation,
        lr_freq=lr_freq,
        lr_scale=lr_scale,
        lr_lora=lr_lora,
        lr_full=lr_full,
        to=to,
        params=settings(tunables or []) or None,
        init=init,
        ada_freq=not no_adafreq,
        ada_scale=not no_adascale,
        share_heads=share_heads,
        dtype=dtype,
        grad_ckpt=grad_ckpt,
        save_steps=save_steps,
        seed=seed,
        resume=resume,
        overwrite=overwrite,
    )
    if as_json:
        print_json(result)
    if not result["finished"]:
        fail(f"stopped before the end: go on with the same command and --resume (so far: {out})")
        raise typer.Exit(1)
    if not as_json:
        stdout().print(
            f"{out}: done; see it with `ropex eval nll {out} ...`, write it with `ropex export {out} -o OUT`"
        )
