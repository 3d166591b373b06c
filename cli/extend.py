"""ropex extend"""

from pathlib import Path
from typing import Annotated, Any

import typer

from ropex.cli.common import fail, goes_on, length, note, print_json, progress, settings, stdout, table
from ropex.cli.evaluate import show_nll
from ropex.config import ADAROPE, read_json
from ropex.errors import RopexError


def extend(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(metavar="SRC", help="A checkpoint folder, a .gguf file, a Hub id, a run, or 'nano'."),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The run's folder.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A .yaml file, or a recipe that comes with ropex; flags win over it.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="The window wanted, such as 16k.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help=".txt, .md, .jsonl, .parquet, a folder, or a Hub dataset; may be repeated.")
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            help="What is trained: warmup-joint (the heads' own parameters, then these and LoRA), warmup-lora (then "
            "LoRA alone), warmup, joint, lora, or full (every weight, in float32)."
        ),
    ] = "warmup-joint",
    to: Annotated[
        str, typer.Option(help="The method that an unconverted SRC gets; all but adarope train LoRA or full.")
    ] = "adarope",
    tunables: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A tunable of the method; may be repeated.")
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a training window. A shorter one than the target is cheaper: its positions jump, to cover "
            "the target's. \\[default: target]"
        ),
    ] = None,
    plain_skip: Annotated[
        bool,
        typer.Option(
            "--plain-skip/--no-plain-skip",
            help="With such a window: tokens do not stand for the positions skipped after them (PoSE as published).",
        ),
    ] = False,
    recall_share: Annotated[
        float | None,
        typer.Option(
            help="Share of the windows that get facts put into their text, stated and later asked for. \\[default: 0.5 "
            "where positions jump, else 0]"
        ),
    ] = None,
    pack: Annotated[
        bool, typer.Option("--pack/--no-pack", help="Fill a window with short documents that do not see each other.")
    ] = False,
    steps_warmup: Annotated[int, typer.Option(help="Steps of the warm-up: rotary parameters alone.")] = 40,
    steps_joint: Annotated[
        int, typer.Option(help="Steps of the stage after the warm-up, or of joint, lora or full.")
    ] = 60,
    batch_size: Annotated[int, typer.Option(help="Windows of a forward pass.")] = 1,
    accumulation: Annotated[int, typer.Option(help="Forward passes of a step.")] = 1,
    lr_freq: Annotated[float, typer.Option(help="Learning rate of delta (frequencies).")] = 1e-2,
    lr_scale: Annotated[float, typer.Option(help="Learning rate of tau and gamma (scale).")] = 1e-2,
    lr_lora: Annotated[float, typer.Option(help="Learning rate of LoRA.")] = 2e-4,
    lora_r: Annotated[int, typer.Option(help="Rank of LoRA, on q and k.")] = 16,
    lora_alpha: Annotated[int, typer.Option(help="Scale of LoRA: alpha / rank.")] = 16,
    lr_full: Annotated[float, typer.Option(help="Learning rate of all weights, with --strategy full.")] = 5e-5,
    init: Annotated[str, typer.Option(help="The method that the heads start from.")] = "yarn",
    no_adafreq: Annotated[
        bool, typer.Option("--no-adafreq/--adafreq", help="Leave the frequencies as they start.")
    ] = False,
    no_adascale: Annotated[
        bool, typer.Option("--no-adascale/--adascale", help="Leave the attention scale as it starts.")
    ] = False,
    all_pairs: Annotated[
        bool,
        typer.Option(
            "--all-pairs/--no-all-pairs",
            help="Train the frequencies of pairs that do not turn once within the target as well, as published.",
        ),
    ] = False,
    share_heads: Annotated[
        bool, typer.Option("--share-heads/--no-share-heads", help="One table and scale for all heads.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="Backbone in float32 or bfloat16. \\[default: as stored]")] = None,
    grad_ckpt: Annotated[
        bool | None,
        typer.Option(
            "--grad-ckpt/--no-grad-ckpt",
            help="Recompute activations, which saves memory. \\[default: for windows from 4k on]",
        ),
    ] = None,
    attn: Annotated[
        str,
        typer.Option(
            help="Attention: auto, sdpa, eager or flash_attention_2; auto takes flash where it is installed, and sdpa "
            "where tokens stand for skipped positions, which flash cannot."
        ),
    ] = "auto",
    save_steps: Annotated[int | None, typer.Option(help="Steps between checkpoints. \\[default: ten a stage]")] = None,
    keep: Annotated[int, typer.Option(help="Checkpoints kept for each stage.")] = 2,
    report_to: Annotated[str | None, typer.Option(help="A tracker, such as tensorboard.")] = None,
    seed: Annotated[int, typer.Option(help="Windows, their order and LoRA's start follow from this.")] = 0,
    eval_data: Annotated[
        list[str] | None,
        typer.Option(help="Unseen text for the table and plot of NLL before and after. \\[default: training text]"),
    ] = None,
    compare: Annotated[bool, typer.Option("--eval/--no-eval", help="Make that table and plot at the end.")] = True,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what each stage needs of memory, from headers alone, and stop.")
    ] = False,
    plan_devices: Annotated[
        int, typer.Option(help="Devices that --plan is for; FSDP2 shards the backbone over them.")
    ] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that ropex wrote.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Train the extension: rotary parameters first, then rotary parameters and LoRA together.

    [bold]Examples[/bold]
      ropex extend ./SmolLM2-135M -o run --target 16k --data books/ --window 2048 --dtype bf16
      ropex extend ./SmolLM2-135M -o run --target 16k --data books/ --window 2048 --dtype bf16 --resume
      ropex extend ./SmolLM2-135M -o run --recipe smollm2-135m-16k --data books/ --eval-data held-out.txt
      ropex extend ./Llama-3-8B --recipe llama3-8b-64k --plan --plan-devices 8
      ropex extend ./SmolLM2-135M -o healed --target 16k --data books/ --to rope-id --strategy full --dtype float32
    """
    asked: dict[str, Any] = {
        "source": source,
        "target": length(target, "--target") if target else None,
        "data": data,
        "strategy": strategy,
        "to": to,
        "params": settings(tunables or []) or None,
        "window": length(window, "--window") if window else None,
        "plain_skip": plain_skip,
        "recall_share": recall_share,
        "pack": pack,
        "steps_warmup": steps_warmup,
        "steps_joint": steps_joint,
        "batch_size": batch_size,
        "accumulation": accumulation,
        "lr_freq": lr_freq,
        "lr_scale": lr_scale,
        "lr_lora": lr_lora,
        "lr_full": lr_full,
        "lora_r": lora_r,
        "lora_alpha": lora_alpha,
        "init": init,
        "ada_freq": not no_adafreq,
        "ada_scale": not no_adascale,
        "all_pairs": all_pairs,
        "share_heads": share_heads,
        "dtype": dtype,
        "attn": attn,
        "grad_ckpt": grad_ckpt,
        "save_steps": save_steps,
        "keep": keep,
        "report_to": report_to,
        "seed": seed,
    }
    if recipe is not None:
        from ropex.train.recipe import read_recipe

        flags = {"ada_freq": "no_adafreq", "ada_scale": "no_adascale", "params": "tunables"}
        given = {
            key: value
            for key, value in asked.items()
            if getattr(context.get_parameter_source(flags.get(key, key)), "name", "") == "COMMANDLINE"
        }
        asked = read_recipe(recipe) | given
    src, texts = asked.pop("source", None), asked.pop("data", None)
    if not src:
        raise typer.BadParameter("give the checkpoint, here or in the recipe", param_hint="SRC")
    if plan:
        show_plan(src, asked, plan_devices, as_json)
        return
    if out is None or not texts:
        needed = (("-o, a folder for the run", out), ("--data, the text to train on", texts))
        raise typer.BadParameter(f"give {', and '.join(name for name, value in needed if not value)}")
    asked.setdefault("target", None)
    if compare and eval_data and not (resume and out.exists()):  # a mistake there should not wait for the end
        from ropex.eval.nll import check_text

        check_text(src, eval_data, asked["target"] or 2)
    from ropex.train.extend import extend as run

    result = run(src, out, data=texts, resume=resume, overwrite=overwrite, **asked)
    if not goes_on():
        raise typer.Exit(0 if result["finished"] else 1)
    compared = None
    if result["finished"] and compare:
        compared = before_and_after(src, out, eval_data, texts, result["settings"], resume)
    if as_json:
        print_json(result | ({"nll": compared} if compared else {}))
    if not result["finished"]:
        fail(f"stopped before the end: go on with the same command and --resume (so far: {out})")
        raise typer.Exit(1)
    if as_json:
        return
    if compared:
        show_nll(compared)
    stdout().print(f"{out}: done; see it with `ropex eval nll {out} ...`, write it with `ropex export {out} -o OUT`")


def untrained(source: str, out: Path, settings: dict[str, Any]) -> list[str]:
    """What the run started from: the source with its method on the fly, where that says it."""
    from ropex.convert.inspect import inspect
    from ropex.train.recipe import RECIPE, read_recipe

    if read_recipe(out / RECIPE).get("params"):
        return []
    facts, method = inspect(source), settings["init"] if settings["to"] == ADAROPE else settings["to"]
    if facts["method"] != "rope" or method == "rope":
        return []
    return [f"{source}@{method}:{settings['target'] / facts['window']}"]


def before_and_after(
    source: str,
    out: Path,
    unseen: list[str] | None,
    trained_on: list[str],
    settings: dict[str, Any],
    kept: bool,
) -> dict[str, Any]:
    """NLL at the target of the source, of what the run started from, and of the run; kept in the run with a plot.
    Without unseen text, on a window each of two documents of the training text, and it says so. kept: a table that is
    there already stands."""
    from ropex.eval.nll import evaluate_nll
    from ropex.eval.plot import plot_nll
    from ropex.text import sources
    from ropex.train.atomic import write_json
    from ropex.train.runfolder import NLL, PLOT

    if kept and not unseen and (out / NLL).exists():  # the run was finished before, and so was its table
        return dict(read_json(out / NLL))
    few: dict[str, Any] = {} if unseen else {"documents": 2, "windows": 1}
    with progress() as say:
        try:
            checkpoints = [source, *untrained(source, out, settings), str(out)]
            text = unseen or [str(s) for s in sources(trained_on)]
            report = evaluate_nll(checkpoints, text, [settings["target"]], dtype=settings["dtype"], progress=say, **few)
        except RopexError as error:  # the run is made all the same; its training text may have no such long document
            note(f"no table of NLL before and after ({error}): make it with `ropex eval nll`")
            return {}
    write_json(out / NLL, report)
    plot_nll(report, out / PLOT)
    if not unseen:
        note("the NLL below is of text that was trained on: give --eval-data for unseen text")
    note(f"the table is in {out / NLL}, a picture of it in {out / PLOT}")
    return report


def show_plan(source: str, asked: dict[str, Any], devices: int, as_json: bool) -> None:
    """Bytes by stage and by what holds them."""
    from ropex.train.plan import plan

    result = plan(source, devices, **asked)
    if as_json:
        print_json(result)
        return
    from ropex.train.report import size

    made, each = result["settings"], "" if devices == 1 else f" for each of {devices} processes"
    console = stdout()
    console.print(
        f"{source}{each} in {made['dtype']}, {made['batch_size']} x {made['window']:,} tokens at a time, "
        f"activations {'recomputed' if made['grad_ckpt'] else 'kept (--grad-ckpt recomputes them)'}"
    )
    shown = table("memory of each stage", "stage", *result["stages"])
    for part in next(iter(result["stages"].values())):
        shown.add_row(part, *(size(stage[part]) for stage in result["stages"].values()))
    console.print(shown)
    console.print(f"free on {result['device']}: {size(result['available'])}")
    for remark in result["notes"]:
        note(remark)
