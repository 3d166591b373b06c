import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = [[name] for name in ("inspect", "convert", "verify", "extend", "export", "report", "demo")]
COMMANDS += [["eval", name] for name in ("nll", "needle", "recall", "ruler", "tasks")]


def ropex(*args: object, check: str = "", **options) -> subprocess.CompletedProcess:
    """The command line in a process of its own; `check` runs after it, with its exit code in `code`."""
    script = f"""
import sys
sys.argv = {["ropex", *map(str, args)]!r}
from ropex.cli import main
code = 0
try:
    main()
except SystemExit as stop:
    code = stop.code or 0
{check}
sys.exit(code)
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, **options)


HEAVY = "assert not {'torch', 'transformers', 'peft', 'matplotlib', 'datasets'} & set(sys.modules), 'heavy import'"


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["convert"], *([*c, "--help"] for c in COMMANDS)])
def test_help_and_usage_errors_import_nothing_heavy(args):
    """RX-46."""
    done = ropex(*args, check=HEAVY)
    assert "heavy import" not in done.stderr, done.stderr
    assert done.returncode == (2 if args == ["convert"] else 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_help_has_an_example(command):
    text = " ".join(ropex(*command, "--help").stdout.split())
    assert f"ropex {' '.join(command)} " in text.partition("Example")[2]


def one_line(done: subprocess.CompletedProcess, code: int = 1) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == code and len(lines) == 1 and done.stdout == "", (done.returncode, done.stderr)
    return lines[0]


def test_bad_input_is_one_line_that_names_the_cure_and_leaves_nothing(folder, tmp_path):
    out = tmp_path / "out"
    assert "does not exist" in one_line(ropex("inspect", tmp_path / "nowhere"))
    assert "no config.json" in one_line(ropex("convert", tmp_path, "-o", tmp_path.parent / "o", "--to", "yarn"))
    assert "choose one of" in one_line(ropex("convert", folder, "-o", out, "--to", "yarrn"))
    for command in (["eval", "ruler"], ["eval", "needle"], ["eval", "recall"], ["inspect", "--probe"]):
        arguments = [*command, folder, "--lengths", "128", "--dtype", "int8"]
        assert "unknown dtype 'int8'" in one_line(ropex(*arguments))  # before the text is looked for
    below = one_line(ropex("convert", folder, "-o", out, "--to", "yarn", "--target", "64"))
    assert "below the native window of 128" in below
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("x")
    taken = one_line(ropex("convert", folder, "-o", tmp_path / "taken", "--to", "adarope"))
    assert "was not written by ropex: choose another folder" in taken
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert "incomplete" in one_line(ropex("convert", folder, "-o", out, "--to", "adarope"))
    assert not out.exists() and sorted(p.name for p in tmp_path.iterdir()) == ["T-llama", "taken"]


@pytest.mark.parametrize("wrong", ["sixteen", "16q", "-4", "0", "1.0001k"])
def test_a_length_that_is_none_is_a_usage_error(folder, tmp_path, wrong):
    done = ropex("convert", folder, "-o", tmp_path / "out", "--to", "yarn", f"--target={wrong}")
    assert done.returncode == 2 and "16k" in done.stderr and "--target" in done.stderr
    assert not (tmp_path / "out").exists()


def test_json_is_one_document_and_nothing_else(folder, tmp_path):
    """RX-49."""
    assert json.loads(ropex("inspect", folder, "--json").stdout)["heads"] == 8
    done = ropex("convert", folder, "-o", tmp_path / "out", "--to", "adarope", "--target", "1k", "--json")
    assert json.loads(done.stdout)["target"] == 1024
    done = ropex("export", tmp_path / "out", "-o", tmp_path / "x", "--json")
    assert json.loads(done.stdout)["format"] == "per-head"


def test_formats_that_are_none_are_told_before_anything_heavy_is_imported():
    done = ropex("eval", "recall", "nowhere", "--lengths", "1k", "--formats", "lines,poem", check=HEAVY)
    assert "choose of lines, sentence, code, quote" in one_line(done)
    done = ropex("eval", "recall", "nowhere", "--lengths", "1k", "--windows", "0", check=HEAVY)
    assert done.returncode == 2 and "--windows" in done.stderr and "heavy import" not in done.stderr


def test_a_traceback_comes_only_with_debug_and_never_shows_locals(tmp_path):
    assert "Traceback" not in ropex("inspect", tmp_path / "nowhere").stderr
    shown = ropex("--debug", "inspect", tmp_path / "nowhere").stderr
    assert "Traceback" in shown and "locals" not in shown


def test_lengths_settings_and_names():
    from ropex.cli.common import length, lengths, names, settings

    assert [length(t, "--target") for t in ("16384", "16k", "1.5K", "1m")] == [16384, 16384, 1536, 1048576]
    assert lengths("4k,8k") == [4096, 8192] and names("a, b,") == ["a", "b"]
    assert settings(["beta_fast=16"]) == {"beta_fast": 16.0}


def test_flags_win_over_a_recipe_and_silence_does_not(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    import ropex.train.extend as module
    from ropex.cli import app

    seen = {}

    def record(source, out, **asked):
        seen.update(asked, source=source)
        return {"finished": True, "settings": {}}

    monkeypatch.setattr(module, "extend", record)
    words = ["extend", "--recipe", "nano", "-o", str(tmp_path / "run"), "--data", "x.txt", "--lr-freq", "0.5"]
    done = CliRunner().invoke(app, [*words, "--no-adascale", "--target", "4k", "--no-eval"])
    assert done.exit_code == 0, done.output
    assert (seen["source"], seen["data"], seen["lr_freq"], seen["target"]) == ("nano", ["x.txt"], 0.5, 4096)
    assert seen["steps_joint"] == 70 and seen["lr_scale"] == 0.02  # the recipe's, where the flag's default is another
    assert seen["ada_scale"] is False and "ada_freq" not in seen
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("source: nano\nplain_skip: true\nada_freq: false\nshare_heads: true\n")
    words[2] = str(recipe)
    done = CliRunner().invoke(app, [*words, "--no-plain-skip", "--adafreq", "--target", "4k", "--no-eval"])
    assert done.exit_code == 0, done.output
    assert (seen["plain_skip"], seen["ada_freq"], seen["share_heads"]) == (False, True, True)


def test_a_run_ends_with_a_table_and_a_plot_of_before_and_after(tmp_path):
    text, out = ROOT / "demo" / "text", tmp_path / "run"
    words = ["extend", "nano", "-o", out, "--target", "320", "--data", text / "train.txt", "--strategy", "warmup"]
    done = ropex(*words, "--steps-warmup", "1", "--json")
    rows = json.loads(done.stdout)["nll"]["results"]
    assert [row["checkpoint"] for row in rows] == ["nano", "nano@yarn:1.25", str(out)] and "trained on" in done.stderr
    assert rows[0]["mean"] - rows[1]["mean"] > 0.02 > abs(rows[1]["mean"] - rows[2]["mean"]) > 0
    assert rows[0]["windows"] == 1
    assert json.loads((out / "nll.json").read_text())["results"] == rows and (out / "nll.png").stat().st_size > 5000
    unseen = ropex(*words, "--steps-warmup", "1", "--json", "--resume", "--eval-data", text / "dev.txt")
    assert json.loads(unseen.stdout)["nll"]["results"] != rows
    again = ropex(*words, "--steps-warmup", "1", "--json", "--resume")  # a table of unseen text stays
    assert json.loads(again.stdout)["nll"] == json.loads(unseen.stdout)["nll"]


def test_unseen_text_that_is_not_there_is_noticed_before_training(tmp_path):
    text, words = ROOT / "demo" / "text" / "train.txt", ["extend", "nano", "-o", tmp_path / "run", "--target", "512"]
    (tmp_path / "short.txt").write_text("far too short")
    for wrong, said in ((tmp_path / "missing.txt", "does not exist"), (tmp_path / "short.txt", "no document reaches")):
        done = ropex(*words, "--data", text, "--eval-data", wrong)
        assert done.returncode == 1 and said in done.stderr and not (tmp_path / "run").exists()


def test_a_run_without_a_checkpoint_or_a_text_is_a_usage_error(tmp_path):
    done = ropex("extend", "-o", tmp_path / "run", "--target", "1k", "--data", "x.txt")
    assert done.returncode == 2 and "SRC" in done.stderr
    done = ropex("extend", "nano", "-o", tmp_path / "run", "--target", "1k")
    assert done.returncode == 2 and "--data" in done.stderr


def test_names_are_no_markup_and_no_terminal_is_too_plain_for_them(folder, tmp_path):
    out = tmp_path / "o[red]x[/b] \u00e9"
    done = ropex("convert", folder, "-o", out, "--to", "yarn", "--factor", "2", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "o[red]x[/b]" in done.stdout and out.exists()
    assert "o[red]x[/b]" in ropex("verify", out, env={"PYTHONIOENCODING": "ascii"}).stdout
