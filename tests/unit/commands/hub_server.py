"""A server that answers uploads as the Hugging Face Hub does, and keeps the files of its repositories."""

from __future__ import annotations

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml


class Hub:
    """Within `with`, `url` is its address; `repos` holds the files of each repository."""

    def __init__(self, token: str) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.status: int | None = None
        """Status of every answer to a write, in place of what it asks for."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                is_known = self.headers.get("Authorization") == f"Bearer {token}"
                status, value = 200, {}
                if self.command == "POST" and hub.status is not None:
                    status, value = hub.status, {"error": "not today"}
                elif self.path.startswith("/api") and not is_known:
                    status, value = 401, {"error": "Invalid username or password."}
                elif self.path.startswith("/api"):
                    status, value = hub.serve(self.path.partition("?")[0], body)
                text = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text)

            do_GET = do_POST = do_HEAD = answer

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _validate(self, card: str) -> tuple[int, Any]:
        """Return the answer about a model card: the Hub demands this form of `dataset.type`."""
        data = yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))
        results = [one for model in data.get("model-index", ()) for one in model["results"]]
        wrong = [one for one in results if not re.fullmatch(r"([\w-]+/)?[\w.-]+", one["dataset"]["type"], re.ASCII)]
        errors = [
            {"message": f"dataset.type {one['dataset']['type']!r} fails to match the required pattern"} for one in wrong
        ]
        return (400 if errors else 200), {"errors": errors, "warnings": []}

    def serve(self, path: str, body: bytes) -> tuple[int, Any]:
        """Return status and answer of a request with the right token."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            if repo in self.repos:
                return 409, {"error": "You already created this model repo", "url": f"{self.url}/{repo}"}
            self.repos[repo] = {".gitattributes": b""}
            if asked.get("visibility") == "private" or asked.get("private"):
                self.private.add(repo)
            return 200, {"url": f"{self.url}/{repo}", "id": repo}
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        if not path.startswith("/api/models/"):
            return 404, {"error": "not found"}
        owner, name, *rest = path.removeprefix("/api/models/").split("/")
        if (repo := f"{owner}/{name}") not in self.repos:
            return 404, {"error": "Repository not found"}
        files = self.repos[repo]
        if not rest:
            return 200, {"id": repo, "private": repo in self.private, "siblings": [{"rfilename": one} for one in files]}
        if rest[0] == "tree":
            return 200, [{"type": "file", "path": one, "size": len(files[one]), "oid": "0" * 40} for one in files]
        if rest[0] == "preupload":
            asked = [one["path"] for one in json.loads(body)["files"]]
            return 200, {"files": [{"path": one, "uploadMode": "regular", "shouldIgnore": False} for one in asked]}
        assert rest[0] == "commit", path
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            elif item["key"] == "deletedFile":
                del files[item["value"]["path"]]
        return 200, {"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.url}/{repo}/commit/{'1' * 40}"}
