"""Short prompts pass a long one that has begun, and the long one keeps half of each step.

Prompts are served in order, so without this a short one would wait until the long prefill before it
is over. With it, who lacks at most a sixteenth of what the longest begun prompt lacks starts at
once: nobody's wait is out of proportion to its own length, and one newcomer delays the long one by
a sixteenth. Prompts nearer to each other in length keep to the order, which on average gets both
done sooner than taking turns.

Whatever comes, the long prompt gets half of what the decodes of those before it leave of a step.
Those that pass it share the other half: their decodes come first there, since a stream that has
begun must go on, and no more of them start than it holds. What they leave is the long prompt's too.
"""

from __future__ import annotations

from serve.scheduler.request import Request

TIMES_SHORTER = 16


def kept_for_begun(num_tokens: int) -> int:
    """Of so many tokens of a step, those that a begun prompt does not share."""
    return (num_tokens + 1) // 2


def most_that_passes(begun: Request) -> int:
    """How many tokens a prompt may lack to pass this one."""
    return begun.num_uncomputed_tokens // TIMES_SHORTER
