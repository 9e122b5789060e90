"""Has this request ended, and why."""

from __future__ import annotations

from serve.messages import FinishReason
from serve.scheduler.request import Request


def finish_reason(request: Request, token_id: int) -> FinishReason | None:
    """Why `token_id`, just appended to the request, is its last; None when it is not.

    A stop token within the first `min_tokens` does not count. One at the last allowed position is
    still a stop. The context's end needs no test: nothing is admitted that could pass it.
    """
    if token_id in request.stop_token_ids:
        num_generated = len(request.token_ids) - request.num_prompt_tokens
        if num_generated > request.sampling.min_tokens:
            return FinishReason.STOP
    if len(request.token_ids) >= request.max_num_tokens:
        return FinishReason.LENGTH
    return None
