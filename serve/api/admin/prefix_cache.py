"""The prefix cache over HTTP: keeping a prefix, letting go of it, forgetting the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from serve.api.answering.body import read_body
from serve.api.answering.choices import collect
from serve.api.answering.conversation import conversation_ids
from serve.api.answering.convert import cache_salt
from serve.api.answering.generation import Job, Outputs
from serve.api.answering.streaming import unless_gone
from serve.api.errors import MissingField, NoSuchPin
from serve.api.middleware import request_id_of
from serve.api.openapi import ERROR_RESPONSES, request_body
from serve.api.protocol.prefix_cache import (
    CacheReset,
    NewPin,
    PinList,
    PinnedPrefix,
    PinRequest,
    Unpinned,
)
from serve.api.service import Service
from serve.config import ServerConfig
from serve.engine.async_engine import AsyncEngine
from serve.engine.public_ids import PIN
from serve.errors import InvalidRequest
from serve.sampling_params import SamplingParams
from serve.text.tokenizer import Tokenizer


def prefix_cache_routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["prefix cache"], responses=dict(ERROR_RESPONSES))
    engines, max_bytes = service.engines, service.config.max_request_bytes

    @router.post("/v1/prefix_cache/pin", openapi_extra=request_body(PinRequest))
    async def pin(request: Request) -> NewPin:
        """Keep a prefix. It is computed now, so that the next request finds it."""
        body = await read_body(request, PinRequest, max_bytes)
        engine = service.engine_for(body.model)
        token_ids = await _prefix_ids(body, engine.tokenizer, service.config)
        salt = cache_salt(body.cache_salt)
        block_size = engine.ready.block_size
        job = Job(
            label=PIN + request_id_of(request),
            prompts=[token_ids[: max(1, len(token_ids) // block_size) * block_size]],
            sampling=SamplingParams(max_tokens=0, temperature=0.0),
            cache_salt=salt,
            client=service.clients.of(request.headers, body.user),
            prompt_field=_given(body)[0],
        )
        outputs = Outputs(service, engine, job)  # refuses what cannot be computed
        try:
            computing = partial(unless_gone, request)
            return await _pin(job, body.ttl, engine, lambda: computing(collect(outputs)))
        finally:
            await outputs.aclose()

    @router.get("/v1/prefix_cache/pin")
    async def list_pins() -> PinList:
        answers = [await engine.control("pins") for engine in engines]
        pins = [PinnedPrefix(**pin) for answer in answers for pin in answer.pop("pins")]
        return PinList(data=pins, **_summed(answers))

    @router.delete("/v1/prefix_cache/pin/{pin_id}")
    async def unpin(pin_id: str) -> Unpinned:
        if not any([await engine.control("unpin", pin_id=pin_id) for engine in engines]):
            raise NoSuchPin(f"Nothing is pinned under the id {pin_id[:200]!r}.")
        return Unpinned(id=pin_id)

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> CacheReset:
        return CacheReset(
            **_summed([await engine.control("reset_prefix_cache") for engine in engines])
        )

    return router


def _summed(answers: Sequence[dict[str, int]]) -> dict[str, Any]:
    """The engines' figures together."""
    return {name: sum(answer[name] for answer in answers) for name in answers[0]}


async def _pin(
    job: Job, ttl_s: float | None, engine: AsyncEngine, compute: Callable[[], Awaitable[object]]
) -> NewPin:
    """Claim the prefix before it is computed, so that nothing is computed in vain."""
    wish = {"token_ids": job.prompts[0], "cache_salt": job.cache_salt or "", "ttl_s": ttl_s}
    claim = await engine.control("pin", **wish)
    if claim["num_cached_blocks"] == claim["num_blocks"]:
        return NewPin(**claim)
    try:
        await compute()
    except BaseException:
        if claim["is_new"]:
            await engine.control("unpin", pin_id=claim["id"])
        raise
    return NewPin(**{**await engine.control("pin", **wish), "is_new": claim["is_new"]})


async def _prefix_ids(body: PinRequest, tokenizer: Tokenizer, config: ServerConfig) -> list[int]:
    """The prefix's token ids. Raises InvalidRequest unless there is exactly one way to get them."""
    given = _given(body)
    if len(given) > 1:
        raise InvalidRequest(f"Give one of {', '.join(given)}.", param=given[1])
    if body.messages:
        # What follows the given turns is not known: no answer is begun, unless the caller says so.
        if body.add_generation_prompt is None:
            body.add_generation_prompt = False
        return await conversation_ids(body.messages, body, tokenizer, config)
    if body.prompt:
        return await tokenizer.encode(body.prompt)
    if body.token_ids:
        return body.token_ids
    raise MissingField("Give messages, prompt or token_ids.", param="messages")


def _given(body: PinRequest) -> list[str]:
    return [name for name in ("messages", "prompt", "token_ids") if getattr(body, name)]
