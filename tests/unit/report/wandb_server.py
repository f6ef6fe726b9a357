"""A server that answers a run as that of Weights & Biases does, and keeps the rows."""

from __future__ import annotations

import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server:
    """Within `with`, `url` is its address; `runs` holds the rows of each run by their number."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[int, dict[str, Any]]] = {}
        self.exit_codes: dict[str, list[int]] = {}
        self.silent = False
        self._stopping = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                while server.silent and not server._stopping.is_set():
                    server._stopping.wait(0.05)
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                answer = json.dumps(server.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_PUT = do_POST

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *arguments: Any) -> None:
                """A client that went away is none of our business."""

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Server:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stopping.set()
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        stream = re.match(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path)
        if stream:
            return self._take(stream[1], json.loads(body))
        if path != "/graphql":
            return {}
        asked = json.loads(body)
        name = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
        return {"data": self._tell(name[1] if name else "", asked.get("variables") or {})}

    def _take(self, run: str, sent: dict[str, Any]) -> dict[str, Any]:
        history = (sent.get("files") or {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
        for index, line in enumerate(history["content"]):
            self.runs.setdefault(run, {})[history["offset"] + index] = json.loads(line)
        if "exitcode" in sent:
            self.exit_codes.setdefault(run, []).append(sent["exitcode"])
        return {}

    def _tell(self, question: str, about: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "1", "name": "p", "entity": {"id": "1", "name": "somebody"}}
        if question == "UpsertBucket":
            run = about.get("name") or ""
            new = run not in self.runs
            self.runs.setdefault(run, {})
            bucket = {"id": "1", "name": run, "displayName": run, "config": "{}", "sweepName": None, "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": new}}
        if question == "RunResumeStatus":
            known = self.runs.get(about["name"])
            tail = json.dumps([json.dumps(known[max(known)])]) if known else "[]"
            bucket = None if known is None else {
                "id": "1", "name": about["name"], "displayName": "n", "summaryMetrics": "{}", "config": "{}", "tags": [],
                "logLineCount": 0, "eventsLineCount": 0, "historyLineCount": len(known), "historyTail": tail,
                "eventsTail": "[]", "wandbConfig": '{"t": 1}',
            }  # fmt: skip
            return {"model": {**project, "bucket": bucket}}
        if question == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in about["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        return {}
