import json
import os
import resource
import signal
import subprocess
import sys
import textwrap

import pytest

from ropex.convert.convert import convert
from ropex.convert.output import whole_folder
from ropex.convert.verify import verify
from ropex.errors import CheckpointError, OutputError, RopexError


def test_an_existing_folder_is_kept_and_replaced_only_when_asked_and_ours(folder, tmp_path):
    """RX-47."""
    out = tmp_path / "out"
    convert(folder, out, "adarope")
    before = (out / "config.json").read_bytes()
    with pytest.raises(OutputError, match="--overwrite"):
        convert(folder, out, "yarn", factor=2.0)
    assert (out / "config.json").read_bytes() == before
    replaced = convert(folder, out, "yarn", factor=2.0, overwrite=True)
    assert f"{out} held what was made of {folder}: that is replaced" in replaced["notes"]
    assert not (out / "modeling_adarope.py").exists()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="not written by ropex"):
        convert(folder, theirs, "adarope", overwrite=True)
    assert (theirs / "thesis.txt").exists()


@pytest.mark.parametrize("where", ["same", "link", "inside", "parent", "file"])
def test_the_source_and_its_surroundings_are_never_the_target(folder, tmp_path, where):
    """RX-33."""
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "file").write_text("x")
    places = {"same": folder, "link": tmp_path / "link", "inside": folder / "out", "parent": tmp_path}
    out = places.get(where, tmp_path / "file")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(OutputError):
        convert(folder, out, "adarope", overwrite=True)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_failure_leaves_no_target_no_staging_and_no_new_parents(tmp_path):
    out = tmp_path / "new" / "parents" / "out"
    with pytest.raises(RuntimeError), whole_folder(out, [], False, 0) as staging:
        (staging / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_leaves_the_older_output_intact(folder, tmp_path):
    out = tmp_path / "out"
    convert(folder, out, "adarope")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(RuntimeError), whole_folder(out, [], True, 0) as staging:
        (staging / "half").write_text("x")
        raise RuntimeError
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_too_little_space_is_seen_before_any_work(tmp_path):
    with pytest.raises(OutputError, match="free some space"), whole_folder(tmp_path / "out", [], False, 2**60):
        raise AssertionError("the work began")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_midway_is_one_line_and_leaves_nothing(folder, tmp_path):
    """RX-47: a file-size limit stands in for a full disk."""
    out = tmp_path / "out"
    script = f"from ropex.cli import main; import sys; sys.argv = ['ropex', 'convert', {str(folder)!r}, '-o', "
    script += f"{str(out)!r}, '--to', 'adarope']; main()"
    limit = 20_000
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        preexec_fn=lambda: (
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
        ),
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("ropex: ")]) == 1
    assert not out.exists() and [p.name for p in tmp_path.iterdir()] == ["T-llama"]


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_killed_while_writing_it_leaves_no_target_and_the_next_run_succeeds(folder, tmp_path, kind):
    out = tmp_path / "out"
    script = textwrap.dedent(f"""
        import sys, time
        import ropex.convert.convert as c
        copy = c._write
        def slow(*args):
            copy(*args)
            print("writing", flush=True)
            time.sleep(60)
        c._write = slow
        from ropex.cli import main
        sys.argv = ["ropex", "convert", {str(folder)!r}, "-o", {str(out)!r}, "--to", "adarope"]
        main()
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "writing"
    os.kill(process.pid, kind)
    assert process.wait(timeout=30) != 0
    assert not out.exists()
    if kind == signal.SIGTERM:
        assert [p.name for p in tmp_path.iterdir()] == ["T-llama"]
    convert(folder, out, "adarope")
    assert (out / "config.json").exists() and not (tmp_path / ".out.partial").exists()


def test_files_that_ropex_did_not_write_survive_an_overwrite(folder, tmp_path):
    """RX-47."""
    convert(folder, tmp_path / "out", "adarope")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="holds notes.txt, which ropex did not write"):
        convert(folder, tmp_path / "out", "yarn", factor=2.0, overwrite=True)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_neighbours_with_names_like_ours_stay(folder, tmp_path):
    for name in (".out.partial", ".out.replaced", ".out.x.partial", f".out.{os.getppid()}.partial"):
        (tmp_path / name).mkdir()
    convert(folder, tmp_path / "out", "yarn", factor=2.0)
    assert len(list(tmp_path.glob(".out.*"))) == 4


def dead_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_an_older_output_that_a_kill_left_under_another_name_comes_back(folder, tmp_path):
    convert(folder, tmp_path / "out", "adarope")
    (tmp_path / "out").rename(tmp_path / f".out.{dead_process()}.replaced")
    with pytest.raises(OutputError, match="exists"):
        convert(folder, tmp_path / "out", "yarn", factor=2.0)
    assert (tmp_path / "out" / "model-adarope.safetensors").exists() and not list(tmp_path.glob(".out.*"))


def test_of_two_conversions_to_one_place_one_is_whole_and_the_other_is_told(sharded, tmp_path):
    """Each works in a folder of its own."""
    script = (
        "import sys, time\nimport ropex.convert.convert as c\nwrite = c._write\n"
        "def slow(*a):\n    out = write(*a)\n    time.sleep(float(sys.argv[3]))\n    return out\n"
        "c._write = slow\nc.convert(sys.argv[1], sys.argv[2], sys.argv[4], factor=2.0)\n"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", script, str(sharded), str(tmp_path / "out"), wait, method],
                         stderr=subprocess.PIPE, text=True)
        for wait, method in (("1.5", "yarn"), ("0", "pi"))
    ]  # fmt: skip
    errors = [run.communicate()[1] for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 1], errors
    assert any("exists: choose another folder" in error for error in errors)
    kind = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]["rope_type"]
    assert json.loads((tmp_path / "out" / "ropex.json").read_text())["spec"]["method"] == {"linear": "pi"}.get(
        kind, kind
    )
    verify(tmp_path / "out")


def test_a_rotary_shard_that_does_not_fit_is_one_line(folder, tmp_path):
    """Linked shards take no room, so it is the first thing written."""
    script = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))\n"
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nfrom ropex.cli import main\n"
        f"sys.argv = ['ropex', 'convert', {str(folder)!r}, '-o', {str(tmp_path / 'out')!r}, '--to', 'adarope']\n"
        "sys.argv += ['--link']\n"
        "main()\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 1 and "could not be written" in run.stderr and "Traceback" not in run.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["T-llama"]


def test_a_converted_source_without_its_heads_does_not_get_fresh_ones(folder, tmp_path):
    from ropex.convert.export import export

    convert(folder, tmp_path / "ada", "adarope")
    index = json.loads((tmp_path / "ada" / "model.safetensors.index.json").read_text())
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if "adarope" not in n}
    (tmp_path / "ada" / "model.safetensors.index.json").write_text(json.dumps(index))
    for call in (lambda: convert(tmp_path / "ada", tmp_path / "x", pairing="interleaved"),
                 lambda: export(tmp_path / "ada", tmp_path / "x")):  # fmt: skip
        with pytest.raises(CheckpointError, match="0 rotary tensors where 12 belong"):
            call()
    assert not (tmp_path / "x").exists()


def test_a_damaged_manifest_is_one_line(folder, tmp_path):
    convert(folder, tmp_path / "out", "adarope")
    (tmp_path / "out" / "ropex.json").write_text("{")
    with pytest.raises(RopexError, match="not readable JSON"):
        convert(folder, tmp_path / "out", "adarope", overwrite=True)


def test_when_the_last_rename_fails_the_older_output_stands(folder, tmp_path, monkeypatch):
    convert(folder, tmp_path / "out", "adarope")
    rename = type(tmp_path).rename

    def fails(self, target):
        if self.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", fails)
    with pytest.raises(OutputError, match="Input/output error"):
        convert(folder, tmp_path / "out", "yarn", factor=2.0, overwrite=True)
    assert (tmp_path / "out" / "model-adarope.safetensors").exists() and not list(tmp_path.glob(".out.*"))
