"""A Prometheus made up for tests: `increase` of simulated servers, computed as Prometheus does."""

import json
import re
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import numpy as np

QUERY = re.compile(
    r"sum by \((.*)\) \(increase\(([\w:]+)spec_decode_num_(\w+)_total\{.*\}\[(\d+)s\]\)\)"
)


def increase(times, values, start, end):
    """Prometheus' extrapolatedRate (promql/functions.go) of a counter's readings in (start, end].

    None if there are fewer than two readings.
    """
    inside = (times > start) & (times <= end)
    times, values = times[inside], values[inside]
    if len(times) < 2:
        return None
    falls = np.flatnonzero(np.diff(values) < 0)
    grown = values[-1] - values[0] + values[falls].sum()
    sampled = times[-1] - times[0]
    before, after = times[0] - start, end - times[-1]
    between = sampled / (len(times) - 1)
    if grown > 0:  # a counter was not below 0
        before = min(before, sampled * values[0] / grown)
    before, after = (gap if gap < 1.1 * between else between / 2 for gap in (before, after))
    return grown * (sampled + before + after) / sampled


class FakePrometheus(ThreadingHTTPServer):
    """series: (labels, times, {(name, position): values}) of each process. fails: a status.

    prefix: of all names. tenant: the header that every query needs.
    """

    daemon_threads = True

    def __init__(self, series):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.series, self.queries, self.fails = series, [], None
        self.prefix, self.tenant, self.headers = "vllm:", None, []
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def stop(self):
        self.shutdown()
        self.server_close()

    def answer(self, query, end):
        if (match := QUERY.fullmatch(query)) is None:  # the series themselves
            known = self.series if query.startswith(self.prefix) else []
            current = (labels for labels, times, _ in known if end - 300 < times[-1])
            return [{"metric": labels, "value": [end, "1"]} for labels in current]
        by, prefix, name, seconds = match.groups()
        sums = defaultdict(float)
        for labels, times, counters in self.series:
            for (counter, position), values in counters.items():
                grown = increase(times, values, end - int(seconds), end)
                if (prefix, counter) == (self.prefix, name) and grown is not None:
                    own = labels | ({} if position is None else {"position": str(position)})
                    sums[own.get(by)] += grown
        return [
            {"metric": {} if key is None else {by: key}, "value": [end, str(value)]}
            for key, value in sums.items()
        ]


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        asked = parse_qs(urlsplit(self.path).query)
        query, end = asked["query"][0], float(asked["time"][0])
        self.server.queries.append(query)
        self.server.headers.append(self.headers)
        status = self.server.fails or 200
        if self.server.tenant not in (None, self.headers["X-Scope-OrgID"]):
            status = 401
        if status != 200:
            content = {"status": "error", "error": f"made up for {self.headers['X-Scope-OrgID']}"}
        else:
            result = self.server.answer(query, end)
            content = {"status": "success", "data": {"resultType": "vector", "result": result}}
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
