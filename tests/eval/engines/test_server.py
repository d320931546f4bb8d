"""What a server is asked with, and what of a refusal is shown."""

from base64 import b64encode

import pytest

from align.errors import UserError
from eval.decoding.loop import Decoding, seed_of
from eval.decoding.verification import Sampling
from eval.engines.server import API_KEY, Server, ServerError
from eval.engines.vllm import VllmServer
from eval.prompts import Prompt
from tests.fake_vllm import TEXT


@pytest.mark.parametrize("scheme", ["http://", "ftp://", ""])
@pytest.mark.parametrize("place", ["me:secret@host:8000", "host:8000?k=secret", "host:8000#secret"])
def test_no_secret_of_an_address_is_shown(scheme, place):
    with pytest.raises(UserError, match="host:8000") as refused:
        Server(scheme + place)
    assert "secret" not in str(refused.value)


def test_a_redirect_is_not_followed(fake, monkeypatch):
    monkeypatch.setenv(API_KEY, "secret")  # which another host must not see
    elsewhere = fake()
    with pytest.raises(ServerError) as refused:
        Server(fake(location=elsewhere.url).url).ask("/v1/completions", {"model": "m"})
    assert refused.value.status == 302
    assert elsewhere.requests == []


def test_a_proxy_is_for_other_machines(fake, monkeypatch):
    proxy, server = fake(), fake()
    monkeypatch.setenv("http_proxy", proxy.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert Server(server.url).model == "org/target"
    with pytest.raises(ServerError) as refused:
        Server("http://elsewhere.invalid:8000").ask("/v1/models")
    assert refused.value.status == 404  # the proxy's answer


@pytest.mark.parametrize("prefix", ["http://", ""])
def test_a_proxy_gets_its_password_which_is_never_shown(fake, monkeypatch, prefix):
    proxy = fake()
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"{prefix}me:s%3Fcret@{proxy.url.removeprefix('http://')}")
    server = Server("http://elsewhere.invalid:8000")
    with pytest.raises(ServerError) as refused:
        server.ask("/v1/models")
    assert refused.value.status == 404  # the proxy's answer
    assert proxy.headers["Proxy-Authorization"] == f"Basic {b64encode(b'me:s?cret').decode()}"
    proxy.stop()
    with pytest.raises(ServerError) as refused:
        Server("http://elsewhere.invalid:8000").ask("/v1/models")
    assert "cret" not in str(refused.value)


def test_a_proxy_of_another_kind_is_refused(monkeypatch):
    monkeypatch.setenv("http_proxy", "socks5://me:secret@10.0.0.1:1080")
    with pytest.raises(UserError) as refused:
        Server("http://elsewhere.invalid:8000")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("notice", ["<html>Sign in</html>", "data: <html>\n\n", '{"choices": []}'])
def test_a_page_in_place_of_an_output_is_named(fake, notice):
    """A gateway without a session answers all requests with status 200 and its page."""
    server = fake(notice=notice)
    with pytest.raises(ServerError, match="OpenAI-compatible"):
        VllmServer(server.url).model  # noqa: B018
    client = VllmServer(server.url, model="m")
    with pytest.raises(ServerError, match="OpenAI-compatible"):
        client.generate(Prompt("a", prompt="x"), Decoding(Sampling(), frozenset(), 4))


@pytest.mark.parametrize("padding", range(260, 302))
def test_a_key_is_never_shown_wherever_a_refusal_is_cut(fake, monkeypatch, padding):
    key = "sk-QZXWVKJYGHPLMRNT"
    monkeypatch.setenv(API_KEY, key)
    with pytest.raises(ServerError) as refused:
        Server(fake(key="another", padding=padding).url).ask("/v1/models")
    assert refused.value.status == 401
    assert not any(key[i : i + 4] in str(refused.value) for i in range(len(key) - 3))


@pytest.mark.parametrize("chat", [False, True])
def test_what_a_request_of_a_measured_server_says(fake, chat):
    """Also what the checkpoint's generation config would set if it were left open."""
    prompt = Prompt("b", messages=[{"role": "user", "content": "two"}], category="y")
    prompt = prompt if chat else Prompt("b", prompt="two")
    how = Decoding(Sampling(0.7, 50, 0.9), frozenset(), 20, seed=5)
    server = fake(3)
    response = VllmServer(server.url + "/v1/").decode(prompt, how)
    ((path, body),) = server.requests
    assert path == ("/v1/chat/completions" if chat else "/v1/completions")
    assert body[("messages" if chat else "prompt")] == (prompt.messages if chat else "two")
    assert (body["temperature"], body["top_k"], body["top_p"]) == (0.7, 50, 0.9)
    assert (body["max_tokens"], body["seed"]) == (20, seed_of(5, "b"))
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p")
    assert [body[name] for name in penalties] == [1, 0, 0, 0]
    assert body["ignore_eos"] is False
    assert (response.run.tokens, response.prompt_ids) == (TEXT, [1, 2, 3])
    assert response.counters == (7, 21, 14, [7, 7, 0])


def test_greedy_requests_leave_no_sampling_open(fake):
    server = fake()
    VllmServer(server.url).generate(Prompt("a", prompt="x"), Decoding(Sampling(), frozenset(), 4))
    (body,) = server.streamed
    assert (body["temperature"], body["top_k"], body["top_p"]) == (0.0, -1, 1.0)


def test_a_first_step_of_several_tokens_belongs_to_the_prefill(fake):
    how, prompt = Decoding(Sampling(), frozenset(), 20), Prompt("a", prompt="one")
    run = VllmServer(fake(3).url).decode(prompt, how).run
    assert (run.prefill_tokens, run.block_tokens) == (1, [3, 3, 3, 3, 3, 3, 1])
    run = VllmServer(fake(3, first=4).url).decode(prompt, how).run
    assert (run.prefill_tokens, run.block_tokens) == (4, [3, 3, 3, 3, 3, 1])
    assert run.tokens == TEXT
    assert len(run.block_seconds) == 6
