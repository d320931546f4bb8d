"""Adapters of one base, chosen by request (`routed:DIR`, or `routed:DIR@BASE`).

The draft decides nothing but speed, so a wrong choice costs time and never a word. By default the
adapter is taken whose draft finds the prompt's last tokens likeliest; who knows a request's domain
gives a route of their own. V: the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eval.decoding.adapters import find_adapters
from eval.decoding.drafters.adapter import SharedBase
from eval.decoding.drafters.base import DecoderDrafter, Drafter, GroupedRows, Session, Texts
from eval.decoding.forward import HiddenStates
from eval.decoding.target import Target
from eval.decoding.verification import Sampling

ROUTING_TOKENS = 96  # of the end of a prompt
LEAST = 1e-9  # probability of a token that the head has no row for: the same for every adapter

Route = Callable[[Sequence[int]], str]  # from a prompt's ids to the adapter's name


@dataclass(kw_only=True)
class Routed(Drafter):
    """drafts: by the adapter's name; all read and draft alike, since they share their base."""

    drafts: Mapping[str, DecoderDrafter]
    route: Route

    def start(self, texts: Texts) -> Session:
        rows: dict[str, list[int]] = {}
        for row, ids in enumerate(texts.ids):  # the last of them is the answer's first
            rows.setdefault(self.route(ids[:-1]), []).append(row)
        sessions = [
            self.drafts[name].start(
                texts._replace(
                    ids=[texts.ids[i] for i in own], states=[texts.states[i] for i in own]
                )
            )
            for name, own in rows.items()
        ]
        return GroupedRows(sessions, list(rows.values()))

    def teacher_forced(
        self, ids: list[int], text: list[int], samplings: Sequence[Sampling], states: HiddenStates
    ) -> Iterator[Tensor]:
        return self.drafts[self.route(ids)].teacher_forced(ids, text, samplings, states)

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        return next(iter(self.drafts.values())).step(context_length, sampling)

    def probe(self, ids: list[int]) -> Tensor:
        return torch.cat([draft.probe(ids) for draft in self.drafts.values()])


def by_likelihood(drafts: Mapping[str, DecoderDrafter]) -> Route:
    """The adapter under whose draft the last ROUTING_TOKENS of a prompt are likeliest."""

    @torch.inference_mode()
    def route(ids: Sequence[int]) -> str:
        first, *rest = ids[-ROUTING_TOKENS - 1 :]
        if not rest:
            return next(iter(drafts))
        tokens = torch.tensor(rest)[:, None]
        scores = {}
        for name, draft in drafts.items():
            (q,) = draft.teacher_forced([first], rest, [Sampling(1.0)], {})
            chosen = q[0].gather(-1, tokens.to(q.device))
            scores[name] = float(chosen.float().clamp_min(LEAST).log().mean())
        return max(scores, key=scores.__getitem__)

    return route


def routed(base: SharedBase, drafts: Mapping[str, DecoderDrafter], route: Route) -> Routed:
    """The drafts of adapters on that base, by their names, and who chooses among them."""
    plain = base.plain
    return Routed(
        drafts=drafts,
        route=route,
        vocab_size=plain.vocab_size,
        path=f"routed:{','.join(drafts)}",
        form=plain.form,
        vocabulary=plain.vocabulary,
        bytes=plain.bytes + (len(drafts) - 1) * plain.decoder.layer_bytes(),
        full_form_bytes=plain.full_form_bytes,
        kv_bytes_per_token=plain.kv_bytes_per_token,
    )


def load(spec: str, target: Target, strategy: str) -> Drafter:
    """Of `routed:DIR` or `routed:DIR@BASE`: a folder of runs or of published adapters."""
    folder, _, named = spec.partition(":")[2].partition("@")
    adapters = find_adapters(Path(folder))
    base = SharedBase(named or next(iter(adapters.values())).base, target, strategy)
    drafts = {name: base.drafter(adapter) for name, adapter in adapters.items()}
    return routed(base, drafts, by_likelihood(drafts))
