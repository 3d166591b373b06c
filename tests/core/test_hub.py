import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from huggingface_hub import constants

from ropex.errors import CheckpointError
from ropex.hub import fetch, looks_like_hub_id

SHA = "a" * 40
TOKEN = "hf_" + "secret" * 5
CONFIG = ["config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "LICENSE"]
OTHERS = ["modeling_evil.py", "consolidated.safetensors", "original/params.json", "training_args.bin"]
REPOS = {
    "org/both": [*CONFIG, *OTHERS, "model.safetensors", "pytorch_model.bin"],
    "org/pickled": [*CONFIG, *OTHERS, "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"],
    "org/adapter": ["adapter_config.json", "adapter_model.safetensors"],
    "org/gguf": ["config.json", "model.gguf"],
    "org/gated": [*CONFIG, "model.safetensors"],
}
BODY = b"x" * 3_000_000


class Hub(BaseHTTPRequestHandler):
    """The few addresses of the Hub that a download asks for."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0].strip("/")
        repo = "/".join(path.removeprefix("api/models/").split("/")[:2])
        if repo not in REPOS:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in path:
            files = [{"type": "file", "path": p, "size": len(BODY), "oid": "b" * 40} for p in REPOS[repo]]
            self.answer(200, json.dumps(files).encode())
        elif path.startswith("api/"):
            self.answer(200, json.dumps({"id": repo, "sha": SHA, "siblings": []}).encode())
        elif repo == "org/gated":
            self.answer(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": f"your token {TOKEN}"})
        else:
            self.answer(200, BODY, {"X-Repo-Commit": SHA, "ETag": f'"{path.replace("/", "-")}"'})

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    yield server
    server.shutdown()
    server.server_close()


def test_safetensors_come_alone_and_no_code_comes(hub):
    folder = fetch("org/both")
    assert {p.name for p in folder.rglob("*") if p.is_file()} == {*CONFIG, "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == BODY


def test_pickles_come_where_there_is_nothing_else(hub):
    folder = fetch("org/pickled")
    weights = {"pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"}
    assert {p.name for p in folder.rglob("*") if p.is_file()} == {*CONFIG, *weights}


def test_an_adapter_can_be_fetched(hub):
    folder = fetch("org/adapter")
    assert {p.name for p in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_nothing_is_printed_where_no_terminal_is(hub, capfd):
    fetch("org/adapter")
    assert capfd.readouterr() == ("", "")


def test_what_was_fetched_once_is_there_without_the_hub(hub, monkeypatch):
    folder = fetch("org/both")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert fetch("org/both") == folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/typo", "neither a folder here nor public on the Hub"),
        ("org/gated", "gated: accept its terms .* HF_TOKEN"),
        ("org/gguf", "holds no safetensors and no pytorch_model.bin"),
        ("org/-.-..bad", "neither a folder here nor public on the Hub"),
    ],
)
def test_each_refusal_is_one_line_with_its_cure_and_without_the_token(hub, name, message):
    with pytest.raises(CheckpointError, match=message) as raised:
        fetch(name)
    assert name in str(raised.value) and "\n" not in str(raised.value) and TOKEN not in str(raised.value)
    assert (
        raised.value.__context__ is None or raised.value.__suppress_context__
    )  # a library's own error may show a request's headers


def test_a_machine_without_a_network_is_told_to_bring_a_folder(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    with pytest.raises(CheckpointError, match="cannot be reached .*give the folder") as raised:
        fetch("org/both")
    assert "\n" not in str(raised.value) and TOKEN not in str(raised.value)


def test_offline_mode_is_named(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="OfflineModeIsEnabled.*give the folder"):
        fetch("org/both")


def test_a_name_of_two_parts_is_the_hubs_unless_it_is_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert looks_like_hub_id("HuggingFaceTB/SmolLM2-135M") and looks_like_hub_id("org/Name_1.5-b")
    for text in ("nano", "./a/b", "../b", "/a/b", "a/b/c", "a/", "a/b@yarn:2", "models/x.gguf", "~/b", ""):
        assert not looks_like_hub_id(text)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not looks_like_hub_id("org/name")
