"""A conversion killed at any moment leaves no output or a whole one, and never touches its source."""

import hashlib
import json
import shutil
import subprocess
import sys
import textwrap

import pytest

from ropex.convert.convert import convert
from ropex.convert.verify import verify

POINTS = 40
# Counts everything that touches the file system (Python's own audit events, and each half of every copy), and kills
# the process by SIGKILL at the given one. One fork a kill, so that nothing is imported twice.
SCRIPT = textwrap.dedent("""
    import json, os, signal, sys
    import safetensors.torch  # once, and not in every fork
    import ropex.convert.convert as c
    import ropex.convert.shards as shards

    source, out, kwargs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    around = os.path.dirname(out)
    EVENTS = ("open", "os.", "shutil.")

    def run(kill_at):
        count = 0
        def tick(*_):
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(lambda event, args: tick() if event.startswith(EVENTS) and around in repr(args) else None)
        whole = shards.copy_span
        def in_halves(source, out, start, count):
            whole(source, out, start, count // 2)
            tick()
            whole(source, out, start + count // 2, count - count // 2)
            tick()
        shards.copy_span = in_halves
        c.convert(source, out, **kwargs)
        return count

    def child(kill_at, pipe):
        pid = os.fork()
        if pid == 0:
            try:
                os.write(pipe, str(run(kill_at)).encode() + b"\\n")
            finally:
                os._exit(0)
        return os.waitpid(pid, 0)[1]

    read, write = os.pipe()
    for line in sys.stdin:  # "count", or where to kill
        word = line.strip()
        if word == "count":
            child(0, write)
            print(os.read(read, 100).decode().strip(), flush=True)
        else:
            print(child(int(word), write), flush=True)
""")


def content(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    "asked",
    [
        {"to": "yarn", "factor": 4.0},
        {"to": "yarn", "factor": 4.0, "overwrite": True},
        {"to": "adarope"},
        {"pairing": "interleaved"},
    ],
)
def test_forty_kills_leave_no_output_or_a_whole_one(sharded, tmp_path, asked):
    out = tmp_path / "work" / "out"
    replaces = bool(asked.get("overwrite"))
    source = content(sharded)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(sharded), str(out), json.dumps(asked)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"OMP_NUM_THREADS": "1", "PATH": ""},
    )  # fmt: skip

    def order(word):
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    def old_output():
        if replaces:
            convert(sharded, out, "pi", factor=2.0, overwrite=True)

    old_output()
    total = order("count")
    assert total > POINTS
    verify(out)
    outcomes = set()
    for point in range(POINTS):
        shutil.rmtree(out.parent, ignore_errors=True)
        old_output()
        status = order(1 + point * (total - 1) // (POINTS - 1))
        assert status in (0, 9)
        outcomes.add(out.exists())
        if out.exists():
            verify(out)
        assert content(sharded) == source
    assert True in outcomes  # the last kills come after the rename
    convert(sharded, out, **(asked | {"overwrite": True}))
    verify(out)
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    process.stdin.close()
    process.wait()
