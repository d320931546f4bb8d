"""A vLLM, llama-server or SGLang made up for tests: it records its requests, and can fail."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TEXT = list(range(100, 120))  # the constant model's output to everything, 20 tokens


class Constant:
    """A model for a FakeVllm. Log-probabilities are None where a model gives none."""

    def __init__(self, text=TEXT):
        self.text = text

    def ids(self, body):
        """The token ids of a request's text or messages."""
        return [1, 2, 3]

    def write(self, ids, body):
        """(tokens, log-probabilities at each as {id: value}, finish reason) after a prompt."""
        return self.text[: body["max_tokens"]], None, "length"

    def read(self, ids):
        """The log-probabilities at each token of a prompt but the first."""
        return None


class FakeVllm(ThreadingHTTPServer):
    """A server of `model`; what it does otherwise is an attribute, given by name.

    step: tokens of each streamed message after the first one's `first`; above 1 it speculates with
    `gamma` drafted tokens a step, of which step - 1 are accepted. names, root: of what it serves.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, model=None, **changes):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model or Constant()
        self.step, self.first, self.gamma = 1, 1, 3
        self.names, self.root, self.routes = ["org/target"], "/models/target", {"/tokenize"}
        self.owner = "vllm"  # of its models; "sglang" also streams SGLang's own messages
        self.owned_by = None  # what /v1/models has instead, as of a gateway
        self.version = "0.32.0"  # of vLLM
        self.incremental = False  # whether these have only what is new
        self.max_logprobs, self.max_model_len = 1000, 4096
        self.token_ids = True  # whether a stream has them
        self.lost = 0  # tokens that a stream counts, but lacks
        self.unnamed = ()  # numbers of tokens whose ids a llama-server's stream does not have
        self.counter = "vllm"  # the start of a counter's name
        self.metrics = True  # whether there is a page of counters; a text: that page
        self.counts = changes.get("step", 1) > 1  # whether the page counts speculation
        self.other_drafts = 0  # of other users, with each response
        self.last = {}  # fields of a stream's last message
        self.delay = 0.0  # seconds before a response
        self.refuses_after = self.dies_after = 10**9  # responses; then 400, or an end amid a stream
        # Of the next completions of more than one token, one each: None, a status, (status,
        # headers), "cut" amid the body, "abort" or "error" amid a stream, "hang"
        self.faults = []
        self.refused = None  # a prompt that it answers with 400
        self.error_status = 503  # of an "abort" or "error"
        self.mangle = None  # changes a completion that is not streamed
        self.key = None  # what every request has to bring; a refusal repeats what it brought
        self.padding = 0  # characters before that
        self.location = None  # every request is redirected there
        self.headers = {}  # of the last request
        self.notice = None  # a text that answers every request
        self.__dict__.update(changes)
        self.requests, self.lock, self.stopped = [], threading.Lock(), threading.Event()
        self.known = []  # ids in a llama-server's cache
        self.drafts = self.responses = self.active = self.most_active = 0
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def streamed(self):
        """The bodies of the streamed requests."""
        return [body for _, body in self.requests if body.get("stream")]

    @property
    def page(self):
        """What /metrics says."""
        if isinstance(self.metrics, str):
            return self.metrics
        lines = ["# HELP vllm:num_requests_running Running.", "vllm:num_requests_running 0.0"]
        if self.counts:
            accepted = self.step - 1
            others = self.other_drafts * self.responses
            counts = {"drafts": self.drafts + others, "accepted_tokens": self.drafts * accepted}
            counts["draft_tokens"] = self.drafts * self.gamma + others
            start = f"{self.counter}:spec_decode_num"
            for name, value in counts.items():
                lines.append(f'{start}_{name}_total{{engine="0"}} {value:.1f}')
                lines.append(f'{start}_{name}_created{{engine="0"}} 1.7e+09')
            for i in range(self.gamma):
                place = f'{{engine="0",position="{i}"}} {self.drafts * (i < accepted):.1f}'
                lines.append(f"{start}_accepted_tokens_per_pos_total{place}")
        return "\n".join(lines) + "\n"

    def stop(self):
        self.stopped.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def reply(self, content, status=200, headers=(), cut=False):
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in [("Content-Length", str(len(data))), *headers]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = self.close_connection or cut

    def answered(self):
        """Whether the request is redirected, refused for its key, or answered with a notice."""
        server, brought = self.server, self.headers["Authorization"]
        server.headers = self.headers
        if server.location is not None:
            self.reply("", 302, [("Location", server.location + self.path)])
        elif server.key is not None and brought != f"Bearer {server.key}":
            key = (brought or "").removeprefix("Bearer ")
            self.reply("x" * server.padding + f"Unauthorized: {key}", 401)
        elif server.notice is not None:
            self.reply(server.notice)
        else:
            return False
        return True

    def do_GET(self):
        server = self.server
        if self.answered():
            return
        if self.path == "/v1/models":
            about = {"root": server.root, "owned_by": server.owned_by or server.owner}
            about["max_model_len"] = server.max_model_len
            self.reply({"data": [{"id": name, **about} for name in server.names]})
        elif self.path == "/health":
            self.reply({})
        elif self.path == "/version" and server.version:
            self.reply({"version": server.version})
        elif self.path == "/server_info" and server.owner == "sglang":
            self.reply({"version": "0.5.21", "speculative_num_draft_tokens": server.gamma + 1})
        elif self.path == "/props":
            self.reply({"build_info": "b10434-abc"})
        elif self.path == "/metrics" and server.metrics:
            self.reply(server.page)
        else:
            self.reply({"error": "not found"}, 404)

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append((self.path, body))
            server.active += 1
            server.most_active = max(server.most_active, server.active)
        try:
            if not self.answered():
                self.complete(body)
        finally:
            with server.lock:
                server.active -= 1

    def complete(self, body):
        server = self.server
        if self.path == "/apply-template":
            return self.reply({"prompt": json.dumps(body["messages"])})
        if self.path == "/tokenize" and "content" in body:
            return self.reply({"tokens": server.model.ids({"prompt": body["content"]})})
        if self.path == "/tokenize" and server.owner == "sglang":
            ids = server.model.ids(body)
            return self.reply({"tokens": ids, "count": len(ids), "max_model_len": 4096})
        if self.path == "/generate" and server.owner == "sglang":
            body = {"max_tokens": body["sampling_params"]["max_new_tokens"], **body}
        elif self.path == "/completion":
            ids, body = body["prompt"], {"max_tokens": body["n_predict"], "model": "", **body}
            known, server.known = (server.known if body["cache_prompt"] else []), ids
            body["wide"] = ids[:-1] != known[: len(ids) - 1]
        elif self.path not in {"/v1/completions", "/v1/chat/completions", *server.routes}:
            return self.reply({"error": "not found"}, 404)
        elif body["model"] not in server.names:
            return self.reply({"error": f"The model `{body['model']}` does not exist."}, 404)
        prompt = body.get("input_ids", body.get("prompt"))
        ids = prompt if isinstance(prompt, list) else server.model.ids(body)
        if self.path == "/tokenize":
            return self.reply({"tokens": ids})
        with server.lock:
            server.responses += 1
        time.sleep(server.delay)
        if (
            (prompt and prompt == server.refused)
            or server.responses > server.refuses_after
            or (isinstance(prompt, list) and len(ids) + body["max_tokens"] > server.max_model_len)
        ):
            error = f"maximum context length is {server.max_model_len} tokens"
            return self.reply({"error": error}, 400)
        if body.get("logprobs", 0) > server.max_logprobs:
            error = f"logprobs {body['logprobs']}, max allowed: {server.max_logprobs}"
            return self.reply({"error": error}, 400)
        fault = server.faults.pop(0) if server.faults and body["max_tokens"] > 1 else None
        if fault == "hang":
            server.stopped.wait()
            self.close_connection = True
            return
        if fault not in (None, "cut", "abort", "error"):
            status, headers = fault if isinstance(fault, tuple) else (fault, {})
            return self.reply({"error": f"fault {status}"}, status, headers.items())
        tokens, rows, finish = server.model.write(ids, body)
        if fault == "abort":
            tokens, finish = tokens[:3], "abort"
        if self.path == "/completion":
            return self.complete_llama(ids, tokens, rows, finish, body)
        if self.path == "/generate":
            return self.complete_sglang(ids, tokens, rows, finish, body, fault == "cut")
        if body.get("stream"):
            return self.stream(ids, tokens, finish, "messages" in body, fault)
        choice = {"finish_reason": finish, "token_ids": tokens, "prompt_token_ids": ids}
        if body.get("echo"):
            read = server.model.read(ids)
            tokens, rows = [*ids, *tokens], rows and [None, *read, *rows]
        choice["logprobs"] = rows and {
            "tokens": [f"token_id:{token}" for token in tokens],
            "top_logprobs": [row and {f"token_id:{i}": p for i, p in row.items()} for row in rows],
        }
        sent = {"model": body["model"], "choices": [choice]}
        if server.mangle is not None:
            server.mangle(sent)
        self.reply(sent, cut=fault == "cut")

    def complete_llama(self, ids, tokens, rows, finish, body):
        """As llama-server: a stream has each token in a message, with the time of its step."""
        server, times, done = self.server, [], 0
        while done < len(tokens):
            step = min(server.step if done else server.first, len(tokens) - done)
            times += [len(times)] * step
            with server.lock:
                server.drafts += server.step > 1 and done > 0
            done += step
        if not body.get("stream"):
            top = [[{"id": i, "logprob": p} for i, p in row.items()] for row in rows or []]
            told = [{"id": i, "top_logprobs": t} for i, t in zip(tokens, top, strict=bool(rows))]
            return self.reply(
                {"tokens": tokens} | ({"completion_probabilities": told} if rows else {})
            )
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i, (token, at) in enumerate(zip(tokens, times, strict=True)):
            if i > 5 and server.responses > server.dies_after:
                self.close_connection = True
                return
            if i not in server.unnamed:
                self.event(
                    {"content": "x", "tokens": [token], "tokens_predicted": i + 1}
                    | {"timings": {"predicted_ms": at}}
                )
        self.event(
            {"content": "", "tokens": [], "tokens_predicted": len(tokens)}
            | {"timings": {"predicted_ms": at}, "stop_type": {"length": "limit"}.get(finish, "eos")}
        )
        self.wfile.write(b"0\r\n\r\n")

    def complete_sglang(self, ids, tokens, rows, finish, body, cut):
        """As SGLang 0.5: a message has the output so far, the last one the request's counts."""
        server, done, steps = self.server, 0, 0
        about = {"prompt_tokens": len(ids), "cached_tokens": 0, "finish_reason": None}
        if not body.get("stream"):
            start = body["logprob_start_len"]
            sides = []
            if rows:
                read = server.model.read(ids)[start:]
                sides = [("output", tokens, rows), ("input", ids[start + 1 :], read)]
            for side, said, told in sides:
                own = [[row[token], token, None] for token, row in zip(said, told, strict=True)]
                tops = [[[p, i, None] for i, p in row.items()] for row in told]
                if side == "input":  # of its first token it has none
                    own, tops = [[None, ids[start], None], *own], [None, *tops]
                about |= {f"{side}_token_logprobs": own, f"{side}_top_logprobs": tops}
            return self.reply({"text": "", "output_ids": tokens, "meta_info": about})
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while done < len(tokens):
            if done > 5 and (cut or server.responses > server.dies_after):
                self.close_connection = True
                return
            step = min(server.step if done else server.first, len(tokens) - done)
            steps += done > 0 and server.step > 1
            new, done = slice(done if server.incremental else 0, done + step), done + step
            about["completion_tokens"] = done
            if done == len(tokens):
                kind = {"length": {"type": "length", "length": done}}
                kind["abort"] = {"type": "abort", "status_code": server.error_status}
                about["finish_reason"] = kind.get(finish, {"type": "stop", "matched": tokens[-1]})
                if steps:
                    accepted = steps * (server.step - 1)
                    about |= {"spec_verify_ct": steps, "spec_num_correct_drafts": accepted}
                    about["spec_num_proposed_drafts"] = steps * server.gamma
                    histogram = [*[0] * (server.step - 1), steps]
                    about["spec_correct_drafts_histogram"] = histogram
            text = "".join(map(chr, tokens[new]))
            self.event({"text": text, "output_ids": tokens[new], "meta_info": about})
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def stream(self, ids, tokens, finish, chat, fault):
        """A chat sends the prompt's ids in a separate message, a completion with its first."""
        server = self.server
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.event({"choices": [], **({"prompt_token_ids": ids} if chat else {})})
        done = 0
        while done < len(tokens):
            if done > 5 and fault == "error":
                self.event({"error": {"code": server.error_status, "message": "it failed"}})
            if done > 5 and (fault or server.responses > server.dies_after):
                self.close_connection = True  # amid the output
                return
            step = tokens[done : done + (server.step if done else server.first)]
            choice = {"text": "".join(map(chr, step)), "finish_reason": None}
            choice |= {"token_ids": step} if server.token_ids else {}
            choice |= {} if done or chat else {"prompt_token_ids": ids}
            with server.lock:
                server.drafts += server.step > 1 and done > 0
            self.event({"choices": [choice]})
            done += len(step)
        self.event({"choices": [{"text": "", "finish_reason": finish, "token_ids": []}]})
        counted = {"prompt_tokens": len(ids), "completion_tokens": len(tokens) + server.lost}
        self.event({"choices": [], "usage": counted} | server.last)
        self.wfile.write(b"0\r\n\r\n")

    def event(self, message):
        data = f"data: {json.dumps(message)}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


class Starter:
    """In the place of `serve_vllm`: `started` has every start's target, arguments and config.

    make: a FakeVllm from a start's speculative config, which is None for a server without a draft.
    """

    def __init__(self, make):
        self.make, self.started, self.running, self.most_running = make, [], 0, 0

    @contextmanager
    def serve(self, target, *arguments, log_file=None):
        config = None
        if "--speculative-config" in arguments:
            config = json.loads(arguments[arguments.index("--speculative-config") + 1])
        server = self.make(config)
        log_file.write_text("" if config else "INFO Using V2 Model Runner\n")
        self.started.append((target, arguments, config))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            yield server.url
        finally:
            self.running -= 1
            server.stop()
