"""Has this request ended, and why."""

from __future__ import annotations

from serve.messages import FinishReason
from serve.scheduler.request import Request


def append_until_end(request: Request, sampled: list[int]) -> FinishReason | None:
    """Append sampled tokens to a request, up to one that ends it; returns why it ended.

    A stop token within the first `min_tokens` does not count. One at the last allowed position is
    still a stop. The context's end needs no test: nothing is admitted that could pass it.
    """
    token_ids, stop_token_ids = request.token_ids, request.stop_token_ids
    for token_id in sampled:
        token_ids.append(token_id)
        if token_id in stop_token_ids:
            num_generated = len(token_ids) - request.num_prompt_tokens
            if num_generated > request.sampling.min_tokens:
                return FinishReason.STOP
        if len(token_ids) >= request.max_num_tokens:
            return FinishReason.LENGTH
    return None
