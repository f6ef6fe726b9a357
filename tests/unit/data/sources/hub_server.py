"""A hub of one's own on 127.0.0.1: the few routes that `datasets` and `huggingface_hub` ask for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class Hub:
    """What the server holds, and what it was asked."""

    sets: dict[str, dict[str, bytes]]
    """`org/name` -> path in the repository -> content."""
    gated: tuple[str, ...] = ()
    revision: str = "a" * 40
    asked: list[str] = field(default_factory=list)
    endpoint: str = ""


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """The hub on a free port for as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.asked.append(path)
            code, body, headers = _answer(hub, path.strip("/").split("/"))
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(body)), "X-Repo-Commit": hub.revision}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


Answer = tuple[int, bytes, dict[str, str]]


def _answer(hub: Hub, words: list[str]) -> Answer:
    if words[:2] == ["api", "datasets"] and len(words) >= 4:
        name, rest = "/".join(words[2:4]), words[4:]
        if name in hub.gated:
            return 403, b"{}", {"X-Error-Code": "GatedRepo"}
        if name not in hub.sets:
            return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        return _json(_listing(hub, name, "/".join(rest[2:])) if rest[:1] == ["tree"] else _about(hub, name))
    if words[:1] == ["datasets"] and words[3:4] == ["resolve"]:
        content = hub.sets.get("/".join(words[1:3]), {}).get("/".join(words[5:]))
        if content is not None:
            return 200, content, {"ETag": f'"{hub.revision}{len(content)}"'}
    return 404, b"{}", {"X-Error-Code": "EntryNotFound"}


def _json(value: object) -> Answer:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}


def _about(hub: Hub, name: str) -> dict[str, object]:
    files = [{"rfilename": path} for path in hub.sets[name]]
    return {"id": name, "sha": hub.revision, "private": False, "gated": False, "tags": [], "siblings": files}


def _listing(hub: Hub, name: str, folder: str) -> list[dict[str, object]]:
    """The files and the folders that lie in a folder."""
    found: dict[str, dict[str, object]] = {}
    for path, content in hub.sets[name].items():
        if not path.startswith(f"{folder}/" if folder else ""):
            continue
        inside = path.removeprefix(f"{folder}/" if folder else "")
        place = "/".join(filter(None, (folder, inside.split("/")[0])))
        kind = "directory" if "/" in inside else "file"
        found[place] = {"type": kind, "path": place, "size": len(content), "oid": "0" * 40}
    return list(found.values())
