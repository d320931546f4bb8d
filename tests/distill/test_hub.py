"""A push shows the whole draft or nothing new, whatever breaks on the way, and tells no token.

The Hub is a server here that speaks its HTTP: whoami, create, preupload, LFS, commit.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

from distill.hub import REMEDIES, HubError, push_folder

TOKEN = "hf_NobodyMayReadThis"
CUT = "cut"  # a fault: the connection ends midway


class Hub(ThreadingHTTPServer):
    """Repositories by id, large files by hash. faults: (method, path pattern) -> status or CUT."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos = {}  # id -> {private, commits: [{path: bytes or hash}]}
        self.stored = {}
        self.faults = {}
        self.sent = []  # hashes of large files, in the order they came
        self.address = f"http://127.0.0.1:{self.server_port}"

    def files(self, repo_id):
        """What a visitor sees."""
        commits = self.repos[repo_id]["commits"]
        return {
            path: self.stored[content] if isinstance(content, str) else content
            for path, content in (commits[-1] if commits else {}).items()
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, content=None):
        body = json.dumps(content or {}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 413:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def serve(self):
        path, hub = urlsplit(self.path).path, self.server
        for (method, pattern), fault in hub.faults.items():
            if method == self.command and re.search(pattern, path):
                if fault is CUT:
                    self.rfile.read(int(self.headers["Content-Length"]) // 2)
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                else:
                    self.body()
                    # as some servers do, it repeats what it was sent
                    self.answer(fault, {"error": f"no: {self.headers['Authorization']}"})
                return
        assert self.headers["Authorization"] == (
            f"Bearer {TOKEN}" if "/store/" not in path else None
        ), path
        body = self.body()
        if path == "/api/whoami-v2":
            self.answer(200, {"name": "me", "type": "user"})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            repo_id = f"{asked['organization']}/{asked['name']}"
            known = repo_id in hub.repos
            if not known:
                private = asked["visibility"] == "private"
                hub.repos[repo_id] = {"private": private, "commits": []}
            self.answer(409 if known else 200, {"url": f"{hub.address}/{repo_id}", "error": "is"})
        elif path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/store/(\w+)", path):
            assert hashlib.sha256(body).hexdigest() == found[1]
            hub.stored[found[1]] = body
            hub.sent.append(found[1])
            self.answer(200)
        else:
            self.of_repository(path, body)

    def of_repository(self, path, body):
        hub = self.server
        found = re.fullmatch(r"(?:/api/models)?/(\w+/[\w-]+)(?:\.git)?(/.*)?", path)
        repo_id, action = found[1], found[2] or ""
        if repo_id not in hub.repos:
            self.answer(404, {"error": "Repository not found"})
            return
        repo = hub.repos[repo_id]
        if action in ("", "/revision/main"):
            about = {"id": repo_id, "private": repo["private"], "sha": "0" * 40, "tags": []}
            siblings = [{"rfilename": name} for name in hub.files(repo_id)]
            self.answer(200, about | {"siblings": siblings, "downloads": 0, "likes": 0})
        elif action.startswith("/tree/"):
            files = hub.files(repo_id).items()
            listed = [{"type": "file", "path": p, "size": len(c), "oid": "0"} for p, c in files]
            content = json.dumps(listed).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        elif action.startswith("/preupload/"):
            files = [
                {
                    "path": file["path"],
                    "shouldIgnore": False,
                    "uploadMode": "lfs" if file["path"].endswith("s") else "regular",
                }
                for file in json.loads(body)["files"]
            ]
            self.answer(200, {"files": files})
        elif action == "/info/lfs/objects/batch":
            objects = [
                {key: one[key] for key in ("oid", "size")}
                | (
                    {}
                    if one["oid"] in hub.stored
                    else {"actions": {"upload": {"href": f"{hub.address}/store/{one['oid']}"}}}
                )
                for one in json.loads(body)["objects"]
            ]
            self.answer(200, {"transfer": "basic", "objects": objects})
        else:
            assert action == "/commit/main"
            files = dict(repo["commits"][-1]) if repo["commits"] else {}
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    assert value["oid"] in hub.stored
                    files[value["path"]] = value["oid"]
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            repo["commits"].append(files)
            address = f"{hub.address}/{repo_id}/commit/{'1' * 40}"
            self.answer(200, {"success": True, "commitOid": "1" * 40, "commitUrl": address})

    do_GET = do_POST = do_PUT = serve  # the names that http.server calls


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # whose protocol is not HTTP alone
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def draft(tmp_path):
    folder = tmp_path / "draft"
    (folder / "compact").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A draft\n")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 2000)
    (folder / "compact" / "model.safetensors").write_bytes(bytes(range(255, -1, -1)) * 1000)
    return folder


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_push_is_private_and_whole_in_one_commit(hub, draft):
    assert push_folder(draft, "me/code-draft", public=False) == f"{hub.address}/me/code-draft"
    assert hub.repos["me/code-draft"]["private"] is True
    assert hub.files("me/code-draft") == contents(draft)
    assert len(hub.repos["me/code-draft"]["commits"]) == 1


def test_weights_of_an_earlier_push_go_and_other_files_stay(hub, draft):
    push_folder(draft, "me/code-draft", public=False)
    hub.repos["me/code-draft"]["commits"][-1]["model-00001-of-00002.safetensors"] = b"earlier"
    hub.repos["me/code-draft"]["commits"][-1]["notes.txt"] = b"the owner's"
    push_folder(draft, "me/code-draft", public=False)
    assert hub.files("me/code-draft") == contents(draft) | {"notes.txt": b"the owner's"}


@pytest.mark.parametrize("public", [True, False])
def test_a_repository_of_the_other_visibility_is_refused(hub, draft, public):
    hub.repos["me/code-draft"] = {"private": public, "commits": []}
    with pytest.raises(HubError, match="--public"):
        push_folder(draft, "me/code-draft", public)
    assert hub.files("me/code-draft") == {}
    hub.repos["me/code-draft"]["private"] = not public
    push_folder(draft, "me/code-draft", public)


STAGES = {
    "whoami": ("GET", "whoami"),
    "create": ("POST", "repos/create"),
    "preupload": ("POST", "preupload"),
    "batch": ("POST", "objects/batch"),
    "store": ("PUT", "/store/"),
    "commit": ("POST", "commit/main"),
}
FAULTS = [(stage, 500, "try again later") for stage in STAGES]
# a request without a body (whoami) is not cut midway
FAULTS += [(stage, CUT, "was not reached") for stage in STAGES if stage != "whoami"]
FAULTS += [("commit", fault, REMEDIES[fault]) for fault in REMEDIES]


@pytest.mark.parametrize(("stage", "fault", "remedy"), FAULTS)
def test_a_fault_shows_nothing_new_and_the_same_command_goes_on(hub, draft, stage, fault, remedy):
    if earlier := stage == "commit":  # with a draft that is there already
        push_folder(draft, "me/code-draft", public=False)
        (draft / "model.safetensors").write_bytes(b"new" * 9000)
    before = hub.files("me/code-draft") if earlier else {}
    hub.faults[STAGES[stage]] = fault
    with pytest.raises(HubError) as error:
        push_folder(draft, "me/code-draft", public=False)
    assert TOKEN not in str(error.value)
    assert remedy in str(error.value)
    if "me/code-draft" in hub.repos:
        assert hub.files("me/code-draft") == before
    hub.faults.clear()
    push_folder(draft, "me/code-draft", public=False)
    assert hub.files("me/code-draft") == contents(draft)


def test_large_files_that_arrived_are_not_sent_again(hub, draft):
    first, other = (
        hashlib.sha256((draft / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "compact/model.safetensors")
    )
    hub.faults["PUT", other] = CUT
    with pytest.raises(HubError):
        push_folder(draft, "me/code-draft", public=False)
    assert hub.sent == [first]
    hub.faults.clear()
    push_folder(draft, "me/code-draft", public=False)
    assert hub.sent == [first, other]


def test_the_token_goes_nowhere_but_to_the_hub(hub, draft, capfd, caplog):
    caplog.set_level("DEBUG")
    push_folder(draft, "me/code-draft", public=False)
    printed = capfd.readouterr()
    assert TOKEN not in printed.out + printed.err + caplog.text
    stored = [*hub.files("me/code-draft").values(), *contents(draft).values()]
    assert not any(TOKEN.encode() in content for content in stored)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalTokenNotFoundError("no token"), "not logged in"),
        (OfflineModeIsEnabled("offline"), "was not reached"),
        (ConnectionError("refused"), "was not reached"),
    ],
)
def test_without_login_or_network_it_is_a_clear_error(draft, monkeypatch, error, message):
    def fail(self):
        raise error

    monkeypatch.setattr(HfApi, "whoami", fail)
    with pytest.raises(HubError, match=message):
        push_folder(draft, "org/code-draft", public=False)


@pytest.mark.parametrize("repo_id", ["code-draft", "a/b/c", "org/", "../x", "org/a b"])
def test_no_repository_is_refused(draft, repo_id):
    with pytest.raises(HubError, match="ORG/NAME"):
        push_folder(draft, repo_id, public=False)
