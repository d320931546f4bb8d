"""A kind of drafter that the toolkit does not know, in one file: lookup by the target's own states.

It drafts what followed the place whose hidden state was most like the newest one (cosine). It has
no model of its own, reads two of the target's layers, and proposes nothing while it knows no place.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eval.decoding.drafters.drafter import Drafter, Proposal, Session


def most_alike(states, upto):
    """The place before `upto` whose state is most like the one at `upto`; None for the first."""
    if upto == 0:
        return None
    return int((states[:upto] @ states[upto]).argmax())


def features(states):
    """[T, F]: both layers' states side by side, of unit length."""
    joined = torch.cat([F.normalize(state[0].float(), dim=-1) for state in states.values()], -1)
    return F.normalize(joined, dim=-1)


@dataclass(kw_only=True)
class NearestState(Drafter):
    def start(self, text):
        return StateSession(text.ids, text.states)

    def teacher_forced(self, ids, text, sampling, states):
        known, whole = features(states), [*ids, *text]
        q = torch.zeros((len(text), self.vocab_size))
        for i in range(1, len(text)):
            # the newest token has not been read by the target yet: the one before it has
            place = most_alike(known, len(ids) + i - 2)
            if place is not None:
                q[i, whole[place + 2]] = 1
        return q

    def step(self, context_length, sampling):
        states = F.normalize(torch.randn(context_length, 64), dim=-1)
        return lambda: most_alike(states, context_length - 1)


class StateSession(Session):
    """`text` is one token longer than `known`, the states of what the target has read."""

    def __init__(self, ids, states):
        self.text, self.known = list(ids), features(states)
        assert len(self.text) == len(self.known) + 1

    def propose(self, count):
        place = most_alike(self.known, len(self.known) - 1)
        found = [] if place is None else self.text[place + 2 :][:count]
        return Proposal(torch.tensor(found, dtype=torch.long))

    def commit(self, emitted, accepted, states):
        self.text += emitted
        read = {layer: state[:, : len(emitted)] for layer, state in states.items()}
        self.known = torch.cat([self.known, features(read)])
