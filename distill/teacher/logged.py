"""Logged outputs of the target: it only reads them, and those that are not its own are left out.

One forward pass gives the log-probabilities at every token of an output, and these tell whether the
output is the target's own. At each token, q is the target's distribution at the temperature of the
output, over the C - 1 likeliest tokens and one symbol for all others. For samples of q, the sum of
log q(x) has the mean minus the sum of the entropies, and the sum of the variances of log q as its
variance. Greedy outputs are compared at a low temperature, because engines round differently. The
last cached token at a position is the output's own if this is not one of the likeliest.

Legend: R response tokens, C cached tokens at each, V the target's vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from align.vocabulary import Vocabulary
from distill.teacher.answers import AnsweringTarget, Made, top_logprobs, with_own
from distill.teacher.server_target import Request, ServerTarget
from distill.teacher.store import Answers, CachedAnswer, name_of
from eval.decoding.forward import Decoder, in_pieces
from eval.decoding.target import Target
from eval.prompts import PromptSet

LOWEST = 0.1  # temperature at which greedy outputs are compared
BELOW = 4.0  # standard deviations below the mean from which an output is of another model
RARE = 1e-3  # an own output has a token as rare as the rarest one at most this often
ENDS = 1e-2  # an own output ends anywhere at a stop token as improbable at most this often
REMEDY = (
    "give the target, the chat template and the temperature with which they were generated "
    "(answer_temperature, or `temperature` in each row)"
)
READ_ROWS = 4  # outputs that one forward reads


class Log:
    """Logged outputs by their prompts, and the test whether the target can have given them."""

    def __init__(self, logged: Iterable[PromptSet], temperature: float, target: Vocabulary) -> None:
        """temperature: of outputs whose row has none."""
        self.target = target
        self.outputs: dict[tuple[int, ...], list[tuple[list[int], float]]] = {}
        for prompts in logged:
            for prompt, ids in zip(prompts.prompts, prompts.ids, strict=True):
                output = prompt.logged_output
                assert output is not None
                said = output["token_ids"], output.get("temperature", temperature)
                self.outputs.setdefault(tuple(ids), []).append(said)
        self.by_name: dict[str, tuple[list[int], float]] = {}

    def names(self, prompts: Sequence[list[int]]) -> list[str]:
        """The names of the outputs in a store: of the text, and of where the output begins.

        A prompt that occurs again has the next one of its outputs.
        """
        times: Counter[tuple[int, ...]] = Counter()
        names = []
        for prompt in prompts:
            said = self.outputs[tuple(prompt)][times[tuple(prompt)]]
            times[tuple(prompt)] += 1
            names.append(f"{name_of(prompt + said[0])}-{len(prompt)}")
            self.by_name[names[-1]] = said
        return names

    def own(self, answers: Answers) -> Answers:
        """The outputs that the target can have given; prints how many others there are, and why."""
        faults, deviations = [], 0.0
        for answer, name in zip(answers, answers.names, strict=True):
            comparison = compared(answer, self.by_name[name][1], self.target.vocab_size)
            faults.append(self.fault(answer, comparison))
            # an edit says nothing of the model
            deviations += comparison.deviation(comparison.usual(len(answer.response_ids)))
        kept = [n for n, fault in zip(answers.names, faults, strict=True) if fault is None]
        left_out = Counter(fault for fault in faults if fault is not None)
        counts = ", ".join(f"{count} {fault}" for fault, count in left_out.most_common())
        if faults and PartialState().is_main_process:
            used = f"{len(kept)} of {len(faults)} used"
            print(f"logged outputs: {used}; left out: {counts or 'none'}")
            # one output of a similar model may pass; many together do not
            if len(kept) < len(faults) / 2 or deviations < -BELOW * math.sqrt(len(faults)):
                print(
                    "Warning: the logged outputs together are less likely than the target's own "
                    f"({deviations / math.sqrt(len(faults)):.1f} standard deviations); {REMEDY}."
                )
        return Answers(answers.store, kept, left_out)

    def fault(self, answer: CachedAnswer, comparison: Comparison) -> str | None:
        """Why the target cannot have given this output; None if it can."""
        ended = int(answer.response_ids[-1]) in self.target.all_stops
        size = len(answer.response_ids) - ended
        usual = comparison.usual(size)
        if comparison.deviation(usual) < -BELOW:
            return "of another model or temperature"
        if not usual.all():
            return "edited, or tokenised otherwise than emitted"
        if ended and comparison.log_q[-1].exp() * max(size, 1) < ENDS:
            return "cut off"
        return None


class Comparison(NamedTuple):
    """How an output's tokens compare with samples of q.

    log_q: of x [R]. excess: the sum of log q(x) and the entropy [R]. variance: of log q [R].
    at_most: the probability of the tokens that are at most as likely as x, or more [R].
    """

    log_q: Tensor
    excess: Tensor
    variance: Tensor
    at_most: Tensor

    def usual(self, size: int) -> Tensor:
        """Which of the first `size` tokens are not too rare for an own output of this size."""
        return self.at_most[:size] * size >= RARE

    def deviation(self, chosen: Tensor) -> float:
        """Standard deviations of the sum of log q(x) from its mean, over the first tokens.

        chosen: which of them count [up to R]. The variance is 1 at least, because rounding moves a
        sum without variance, too.
        """
        excess, variance = (part[: len(chosen)][chosen] for part in (self.excess, self.variance))
        return float(excess.sum() / (variance.sum().clamp_min(0) + 1).sqrt())


def compared(answer: CachedAnswer, temperature: float, vocab_size: int) -> Comparison:
    """The comparison for an output that was sampled at this temperature."""
    logp = answer.top_logprobs.double()
    likely, others = logp[:, :-1], vocab_size - logp.shape[1] + 1
    least = likely[:, -1]
    # each of the others is at most as likely as the last of these; fp16 rounds the sum
    others_mass = torch.maximum(1 - likely.exp().sum(1), logp[:, -1].exp())
    log_rest = torch.minimum(others_mass.log(), least + math.log(others))
    power = 1 / max(temperature, LOWEST)
    # the largest sum of p ** power that the others can have
    if power >= 1:
        log_rest = log_rest + (power - 1) * least
    else:
        log_rest = power * log_rest + (1 - power) * math.log(others)
    scores = torch.cat([power * likely, log_rest[:, None]], 1)
    log_sum = scores.logsumexp(1, keepdim=True)
    log_q, log_cached = scores - log_sum, power * logp - log_sum
    q = log_q.exp()
    matches = answer.top_ids == answer.response_ids[:, None]
    column = matches.int().argmax(1, keepdim=True)  # the last one stands for all others
    entropy = -(q * log_q).sum(1)
    log_x = log_cached.gather(1, column)[:, 0]
    at_most = q.flip(1).cumsum(1).flip(1).gather(1, column)[:, 0]
    rare = column[:, 0] == likely.shape[1]
    return Comparison(
        log_x,
        log_q.gather(1, column)[:, 0] + entropy,
        (q * log_q**2).sum(1) - entropy**2,
        torch.where(rare, torch.minimum(at_most, others * log_x.exp()), at_most),
    )


@dataclass(kw_only=True)
class _Reader(AnsweringTarget):
    """A target that reads the outputs of a log."""

    verb = "read"
    log: Log

    def names(self, prompts: list[list[int]], taught: bool = False) -> list[str]:
        return self.log.names(prompts)

    def answers(self, prompts: list[list[int]], taught: bool = False) -> Answers:
        """The logged outputs for these prompts that the target can have given."""
        return self.log.own(super().answers(prompts))


@dataclass
class LocalReader(_Reader):
    """A target in this process. load: returns it; called only if an output has not been read."""

    by = "local"
    load: Callable[[], Target]

    def start(self) -> None:
        self.load()

    def made(self, missing: Mapping[str, list[int]], taught: bool) -> Made:
        state = PartialState()
        # outputs of similar prompts and lengths are read together, because rows are padded
        names = sorted(missing, key=lambda n: (len(missing[n]) // 64, len(self.log.by_name[n][0])))
        groups = [names[at : at + READ_ROWS] for at in range(0, len(names), READ_ROWS)]
        share = groups[state.process_index :: state.num_processes]
        if not share:
            return
        target = self.load()  # before the progress bar begins
        total, quiet = sum(map(len, share)), not state.is_main_process
        with tqdm(desc="logged outputs", total=total, unit="output", disable=quiet) as bar:
            for group in share:
                texts = [(missing[name], self.log.by_name[name][0]) for name in group]
                read = read_outputs(target.decoder, texts, self.settings.top_k)
                for name, answer in zip(group, read, strict=True):
                    yield name, answer.packed(target.vocab_size)
                    bar.update()


@torch.inference_mode()
def read_outputs(
    decoder: Decoder, texts: Sequence[tuple[list[int], list[int]]], top_k: int
) -> list[CachedAnswer]:
    """The outputs of these (prompt, output) pairs, with `top_k` log-probabilities at each token."""
    heads = [torch.tensor(prompt[:-1], dtype=torch.long) for prompt, _ in texts]
    # the last token of a prompt predicts the first of its output
    bodies = [torch.tensor(prompt[-1:] + output[:-1]) for prompt, output in texts]
    head, body = (pad_sequence(rows, True).to(decoder.device) for rows in (heads, bodies))
    cache = decoder.new_cache(len(texts), head.shape[1] + body.shape[1])
    if head.shape[1]:
        for _ in in_pieces(decoder, head, 0, cache):
            pass
    # slots of a head's padding are overwritten before they are read
    start = torch.tensor([len(row) for row in heads])
    tokens = pad_sequence([torch.tensor(output) for _, output in texts], True)
    top: list[list[tuple[Tensor, Tensor]]] = [[] for _ in texts]
    at = 0
    for logits in in_pieces(decoder, body, start, cache, last_only=False):
        said = tokens[:, at : (at := at + logits.shape[1])].to(decoder.device)
        for row, row_logits, row_said in zip(top, logits, said, strict=True):
            logprobs = row_logits.gather(1, row_said[:, None])[:, 0].float()
            logprobs = logprobs - row_logits.float().logsumexp(-1)
            row.append(with_own(*top_logprobs(row_logits, top_k), row_said, logprobs))
    answers = []
    for (prompt, output), row in zip(texts, top, strict=True):
        ids, logprobs = (torch.cat(parts)[: len(output)].cpu() for parts in zip(*row, strict=True))
        text = torch.tensor(prompt), torch.tensor(output)
        answers.append(CachedAnswer(*text, top_ids=ids, top_logprobs=logprobs))
    return answers


@dataclass
class ServerReader(_Reader, ServerTarget):
    """A target behind a server, which reads the outputs of a log."""

    def output(self, name: str, prompt: list[int], request: Request) -> CachedAnswer:
        said, _ = self.log.by_name[name]
        body, about = request.body_of_text(prompt + said), f" to an output of {len(said)} tokens"
        return self.answer(body, about, lambda sent: request.read_text(sent, prompt, said))
