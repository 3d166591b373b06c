import os
import resource
import signal
import subprocess
import sys
import textwrap

import pytest

from ropex.convert.convert import convert
from ropex.convert.output import whole_folder
from ropex.errors import OutputError


def test_an_existing_folder_is_kept_and_replaced_only_when_asked_and_ours(folder, tmp_path):
    """RX-47."""
    out = tmp_path / "out"
    convert(folder, out, "adarope")
    before = (out / "config.json").read_bytes()
    with pytest.raises(OutputError, match="--overwrite"):
        convert(folder, out, "yarn", factor=2.0)
    assert (out / "config.json").read_bytes() == before
    convert(folder, out, "yarn", factor=2.0, overwrite=True)
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
