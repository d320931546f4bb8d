"""Texts that are shown to others have no secret."""

import pytest

from align.errors import masked_arguments


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--api-key", "S", "T", "--seed", "1"], ["--api-key", "***", "***", "--seed", "1"]),
        (["--hf_token=S"], ["--hf_token=***"]),
        (["--server_args", "--api-key S T --seed 1"], ["--server_args", "--api-key *** --seed 1"]),
        (["--server_args", "--api-key='S S' -x"], ["--server_args", "--api-key=*** -x"]),
        (["--server_args=--api-key S"], ["--server_args=--api-key ***"]),
        (["--kv", '{"auth_token": "S", "size": 1}'], ["--kv", '{"auth_token": ***, "size": 1}']),
        (["--kv", '{"keys": ["S", "T"]}'], ["--kv", '{"keys": ***}']),
        (["--ssl-key-password", "S"], ["--ssl-key-password", "***"]),
        (["--base_url", "one=http://h:8000"], ["--base_url", "***"]),
        (["--mcp-servers-json", '{"a": "S"}'], ["--mcp-servers-json", "***"]),
        (["--otlp-traces-endpoint", "http://h:1"], ["--otlp-traces-endpoint", "***"]),
        (["--draft", "https://user:S@host/x"], ["--draft", "https://***@host/x"]),
    ],
)
def test_a_command_is_shown_without_its_secrets_and_addresses(arguments, shown):
    assert masked_arguments(arguments) == shown


def test_settings_are_no_secrets():
    """Mutant: each name with `token` in it."""
    plain = ["--max-num-batched-tokens", "2048", "--tokenizer", "org/t", "--max_new_tokens=64"]
    plain += ["--enable-prompt-tokens-details", "--speculative-config", '{"method": "ngram"}']
    plain += ["--return-tokens-as-token-ids", "--instruction", "Don't say the key: {prompt}"]
    assert masked_arguments(plain) == plain
