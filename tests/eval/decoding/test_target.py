"""What ends a text: all that the tokenizer and both configurations of the model name."""

from types import SimpleNamespace

import pytest

from eval.decoding.build import build_decoder
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import stop_tokens
from eval.decoding.verification import Sampling
from eval.prompts import Prompt


@pytest.fixture
def stops(tiny):
    """What ends a text of a model with such configurations, under a tokenizer that ends in 0."""

    def of(config, generation):
        model = tiny(0)
        model.config.eos_token_id, model.generation_config.eos_token_id = config, generation
        return stop_tokens(model, SimpleNamespace(eos_token_id=0))

    return of


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(None, None, {0}), (7, None, {0, 7}), ([7, 8], [8, 9], {0, 7, 8, 9}), (0, [5, 6], {0, 5, 6})],
)
def test_every_end_of_text_is_known(stops, config, generation, expected):
    assert stops(config, generation) == expected


def test_a_text_ends_at_whichever_comes_first(tiny, stops):
    decoder = build_decoder(tiny(0), 60)

    def text(stops):
        how = Decoding(Sampling(), stops, 20)
        return decode(decoder, None, Prompt("p", prompt="unused"), [5, 6, 7], how).tokens

    whole = text(frozenset())
    second, first = whole[9], whole[3]
    for ends in (stops(None, [second, first]), stops([first, second], None)):
        end = min(i for i, token in enumerate(whole) if token in {0, first, second})
        assert text(ends) == whole[: end + 1]
