"""Many log-probabilities are written in slices, between which the event loop goes on."""

from __future__ import annotations

import asyncio
import json

from serve.api.answering.logprobs import ChatLogprobsWriter, TokenNames
from serve.api.answering.scores import SLICE, ChatScores
from serve.engine.outputs import RequestOutput
from tests.api.scripted import byte_level_tokenizer, fake_logprobs

NUM_TOKENS, NUM_TOP = 1000, 20


async def test_sec_46_others_have_their_turn_while_a_large_answer_is_written() -> None:
    names = TokenNames(byte_level_tokenizer(), as_ids=False, skip_special=True)
    scores = ChatScores(ChatLogprobsWriter(NUM_TOP, names), names)
    entries = [fake_logprobs(i % 256, NUM_TOP) for i in range(NUM_TOKENS)]
    output = RequestOutput("r", "", [], entries, entries, hides_last=True)
    turns = 0

    writing = asyncio.create_task(scores.add(output))
    while not writing.done():
        await asyncio.sleep(0)
        turns += 1

    assert turns > 2 * NUM_TOKENS * NUM_TOP / SLICE
    content = json.loads("".join(scores.pieces()))["content"]
    whole = ChatLogprobsWriter(NUM_TOP, names).generated(entries, hides_last=True)["content"]
    assert content == whole
    assert content[-1]["bytes"] is None
    assert content[-2]["bytes"] is not None
    assert len(json.loads("".join(scores.prompt_pieces()))) == 1 + NUM_TOKENS
