"""Suffix drafts: what followed earlier occurrences of the longest matching end of a request's
tokens, in its own text and in earlier answers of the same client.

Source: Oliaro et al., "SuffixDecoding" (arXiv 2411.04975). In place of its suffix trees this keeps
the places of short grams in a table and compares backwards from there: a token costs one entry.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from serve.scheduler.drafting.drafter import NOTHING, Draft
from serve.scheduler.request import Request
from serve.speculative_config import SpeculativeConfig

GRAM = 2
"""Last tokens by which places are found; matches are no shorter."""
NUM_PLACES = 16
"""Newest places of a gram that are kept, or at most twice as many."""
MOST_TOKENS = 2**18
"""Of all earlier answers together, whatever their number: about 50 MB."""

Place = tuple[Sequence[int], int]
"""Tokens, and the index just behind a gram in them."""


class _Table:
    """Places by gram. Tokens behind a place may still be growing."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], list[Place]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._places

    def find(self, gram: tuple[int, ...]) -> Sequence[Place]:
        return self._places.get(gram, ())

    def add(self, token_ids: Sequence[int], first: int) -> None:
        """The grams that end behind `first` and later."""
        for end in range(max(first, GRAM), len(token_ids) + 1):
            gram = tuple(token_ids[end - GRAM : end])
            places = self._places.setdefault(gram, [])
            places.append((token_ids, end))
            if len(places) > 2 * NUM_PLACES:
                del places[:NUM_PLACES]

    def remove(self, token_ids: Sequence[int]) -> None:
        """Forget all places in these tokens."""
        for end in range(GRAM, len(token_ids) + 1):
            gram = tuple(token_ids[end - GRAM : end])
            kept = [p for p in self._places.pop(gram, ()) if p[0] is not token_ids]
            if kept:
                self._places[gram] = kept


class SuffixDrafter:
    """Nobody's drafts come from another client's text, or from one with another cache salt: how
    fast an answer comes would tell what others have been told."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._own: dict[Request, tuple[_Table, int]] = {}  # and tokens that are in it
        self._earlier: dict[tuple[str, bytes], _Table] = {}  # by client and salt
        self._answers: OrderedDict[int, tuple[tuple[str, bytes], list[int]]] = OrderedDict()
        self._num_answers = 0
        self._num_tokens = 0

    def propose(self, request: Request, most: int) -> Draft:
        """The likeliest continuation of the longest match, and no more than the match is long."""
        tokens = request.token_ids
        if len(tokens) < GRAM:
            return NOTHING
        table, gram = self._table(request), tuple(tokens[-GRAM:])
        places = [*self._found_earlier(request, gram), *table.find(gram)]
        matches = [(self._matched(tokens, place), place) for place in places if _goes_on(place)]
        if not matches:
            return NOTHING
        longest = max(length for length, _ in matches)
        best = [place for length, place in matches if length == longest]
        factor = self._config.suffix_decoding_max_spec_factor
        return Draft(self._continue(best, min(most, max(1, int(longest * factor)))), longest)

    def forget(self, request: Request) -> None:
        """The request is over; its answer may help others of its client."""
        self._own.pop(request, None)
        answer = request.token_ids[request.num_prompt_tokens :]
        if self._config.suffix_decoding_max_cached_requests and len(answer) > GRAM:
            key = _owner(request)
            self._earlier.setdefault(key, _Table()).add(answer, 0)
            self._answers[self._num_answers] = key, answer
            self._num_answers += 1
            self._num_tokens += len(answer)
        most = self._config.suffix_decoding_max_cached_requests
        while len(self._answers) > most or self._num_tokens > MOST_TOKENS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (key, oldest) = self._answers.popitem(last=False)
        self._num_tokens -= len(oldest)
        self._earlier[key].remove(oldest)
        if self._earlier[key].is_empty:
            del self._earlier[key]

    def _table(self, request: Request) -> _Table:
        """Its own text's, with all its known tokens."""
        table, num_known = self._own.get(request) or (_Table(), 0)
        table.add(request.token_ids, num_known + 1)
        self._own[request] = table, len(request.token_ids)
        return table

    def _found_earlier(self, request: Request, gram: tuple[int, ...]) -> Sequence[Place]:
        table = self._earlier.get(_owner(request))
        return () if table is None else table.find(gram)

    def _matched(self, tokens: Sequence[int], place: Place) -> int:
        """How many tokens before a place are the last ones of `tokens`."""
        text, end = place
        most = min(self._config.suffix_decoding_max_tree_depth, end, len(tokens))
        length = GRAM
        while length < most and text[end - length - 1] == tokens[-length - 1]:
            length += 1
        return length

    def _continue(self, places: list[Place], most: int) -> list[int]:
        """Token by token what most places go on with, while that is likely enough."""
        drafted: list[int] = []
        share = 1.0
        while places and len(drafted) < most:
            at = len(drafted)
            votes = Counter(text[end + at] for text, end in reversed(places))
            token_id, count = votes.most_common(1)[0]
            share *= count / len(places)
            if share < self._config.suffix_decoding_min_token_prob:
                break
            drafted.append(token_id)
            places = [
                (text, end)
                for text, end in places
                if text[end + at] == token_id and end + at + 1 < len(text)
            ]
        return drafted


def _goes_on(place: Place) -> bool:
    return place[1] < len(place[0])


def _owner(request: Request) -> tuple[str, bytes]:
    return request.client, request.block_hashes.root
