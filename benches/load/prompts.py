"""Prompts of a given length: words that are one token each in most vocabularies, drawn anew in every run, so that no cache helps."""

import random

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place case "
    "week company system program question work government number night point home water room mother area money story fact month lot "
    "right study book eye job word business issue side kind head house service friend father power hour game line end member law car "
    "city community name president team minute idea body information back parent face others level office door health person art war "
    "history party result change morning reason research girl guy moment air teacher force education"
).split()


class Words:
    """A source of prompts; the same seed gives the same ones."""

    def __init__(self, seed=None):
        self.random = random.Random(seed)

    def about(self, tokens):
        """A text of about so many tokens."""
        return " ".join(self.random.choice(WORDS) for _ in range(max(1, tokens)))
