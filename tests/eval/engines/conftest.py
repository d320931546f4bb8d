"""Stand-ins for vLLM servers."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

TEXT = list(range(100, 120))  # the target's answer to everything, 20 tokens


class Fake(ThreadingHTTPServer):
    """A vLLM server that answers TEXT in blocks of `block` tokens; its faults are attributes."""

    daemon_threads = True

    def __init__(self, block=1, **faults):
        super().__init__(("127.0.0.1", 0), Handler)
        self.block, self.first, self.model, self.text = block, 1, "org/target", TEXT
        self.counted, self.metrics, self.token_ids = block > 1, True, True
        self.dies_after, self.delay, self.traffic = None, 0.0, 0
        self.refuses_after = 10**6
        self.__dict__.update(faults)
        self.drafts = self.drafted = self.accepted = self.answers = 0
        self.active = self.most = 0  # requests at a time
        self.requests = []
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def written(self, body):
        """The prompt's ids, and the text that is streamed."""
        return [1, 2, 3], self.text[: body["max_tokens"]]

    def scored(self, body):
        """The answer to a request that is not streamed: no log-probabilities."""
        return {"choices": [{"text": "x", "logprobs": None}]}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def reply(self, text, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        fake = self.server
        if self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": fake.model}]}))
        elif not fake.metrics:
            self.reply("not found", 404)
        else:
            lines = ["# HELP vllm:num_requests_running Running.", "vllm:num_requests_running 0.0"]
            if fake.counted:
                for name, value in (
                    ("drafts", fake.drafts),
                    ("draft_tokens", fake.drafted),
                    ("accepted_tokens", fake.accepted),
                ):
                    lines.append(f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value:.1f}')
                    lines.append(f'vllm:spec_decode_num_{name}_created{{engine="0"}} 1.7e+09')
                for i in range(3):
                    place = fake.drafts if i < fake.block - 1 else 0
                    lines.append(
                        "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                        f'{{engine="0",position="{i}"}} {place:.1f}'
                    )
            self.reply("\n".join(lines) + "\n")

    def do_POST(self):
        fake = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.requests.append((self.path, body))
        fake.answers += 1
        fake.active += 1
        fake.most = max(fake.most, fake.active)
        try:
            self.answer(fake, body)
        finally:
            fake.active -= 1

    def answer(self, fake, body):
        time.sleep(fake.delay)
        if fake.answers > fake.refuses_after:
            return self.reply('{"error": {"message": "maximum context length is 8 tokens"}}', 400)
        if not body.get("stream"):
            return self.reply(json.dumps(fake.scored(body)))
        self.send_response(200)
        self.end_headers()
        chat = "messages" in body
        ids, text = fake.written(body)
        self.event({"choices": [], **({"prompt_token_ids": ids} if chat else {})})
        at = 0
        while at < len(text):
            width = fake.block if at else fake.first
            if fake.dies_after is not None and fake.answers > fake.dies_after and at > 5:
                return  # in the middle of an answer
            choice = {"text": "x", "finish_reason": None}
            if not at and not chat:
                choice["prompt_token_ids"] = ids
            if fake.token_ids:
                choice["token_ids"] = text[at : at + width]
            self.event({"choices": [choice]})
            if at and fake.block > 1:
                fake.drafts += 1
                fake.drafted += 3
                fake.accepted += fake.block - 1
            at += width
        fake.drafts += fake.traffic
        fake.drafted += fake.traffic
        end = {"text": "", "finish_reason": "length", "token_ids": []}
        self.event({"choices": [end]})
        self.event({"choices": [], "usage": {"prompt_tokens": 7}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, message):
        self.wfile.write(f"data: {json.dumps(message)}\n\n".encode())


@pytest.fixture
def fake():
    made = []

    def make(block=1, kind=Fake, **faults):
        made.append(kind(block, **faults))
        return made[-1]

    yield make
    for server in made:
        server.shutdown()
        server.server_close()
