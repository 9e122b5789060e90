"""How large the KV pool, its host tier, the longest request and a step may be.

Pure arithmetic over the settings and what was measured, so that every rule can be tested without a
device. Sizes that cannot work are ConfigErrors that name both numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from serve.config import CacheConfig, EngineConfig, SchedulerConfig
from serve.errors import ConfigError

logger = logging.getLogger(__name__)

GIB = 2**30

_MOST_OF_HOST = 0.7
_MUCH_OF_HOST = 0.4


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Usable blocks of both tiers (their null blocks come on top) and what fits in them."""

    num_blocks: int
    num_host_blocks: int
    max_model_len: int


def size_cache(
    config: EngineConfig,
    *,
    block_bytes: int,
    model_max_len: int,
    device_free_bytes: int,
    host_total_bytes: int,
    measure_cache_bytes: Callable[[], int],
) -> CacheSize:
    """Decide the cache. `measure_cache_bytes` is asked only when no size was set.

    Order: --num-gpu-blocks-override, --kv-cache-memory-bytes, what the device leaves.
    """
    longest = longest_wanted(config, model_max_len)
    num_blocks = _num_blocks(config, block_bytes, longest, device_free_bytes, measure_cache_bytes)
    pool_tokens = num_blocks * config.cache.block_size
    if config.model.max_model_len_tokens() is not None and longest > pool_tokens:
        raise ConfigError(
            f"--max-model-len {longest}: the KV pool holds only {pool_tokens} tokens "
            f"({num_blocks} blocks of {config.cache.block_size}). Lower --max-model-len to at most "
            f"{pool_tokens}, or enlarge the pool (--kv-cache-memory-bytes)."
        )
    return CacheSize(
        num_blocks=num_blocks,
        num_host_blocks=_num_host_blocks(
            config.cache, config.scheduler.preemption_mode, block_bytes, host_total_bytes
        ),
        max_model_len=min(longest, pool_tokens),
    )


def longest_wanted(config: EngineConfig, model_max_len: int) -> int:
    """Longest request the settings and the model ask for, whatever the pool holds."""
    asked = config.model.max_model_len_tokens()
    if asked is not None and asked > model_max_len:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {model_max_len} tokens that this model was "
            f"made for. Use at most {model_max_len}, or auto."
        )
    return asked or model_max_len


def token_budget(config: SchedulerConfig, default: int, max_model_len: int) -> int:
    """Most tokens of one step. Without chunking the longest prompt must fit into one."""
    asked, default = config.max_num_batched_tokens, max(default, config.max_num_seqs)
    if config.enable_chunked_prefill:
        return asked or default
    if asked is not None and asked < max_model_len:
        raise ConfigError(
            f"--max-num-batched-tokens {asked} is less than the longest request of {max_model_len} "
            "tokens, and --no-enable-chunked-prefill runs whole prompts only. Raise it, lower "
            "--max-model-len, or leave chunking on."
        )
    return asked or max(default, max_model_len)


def _num_blocks(
    config: EngineConfig,
    block_bytes: int,
    longest: int,
    free_bytes: int,
    measure_cache_bytes: Callable[[], int],
) -> int:
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        flag, num_blocks = "--num-gpu-blocks-override", cache.num_gpu_blocks_override
    elif cache.kv_cache_memory_bytes is not None:
        flag, num_blocks = "--kv-cache-memory-bytes", cache.kv_cache_memory_bytes // block_bytes - 1
    else:
        # More than every running request at full length could never be used.
        useful = config.scheduler.max_num_seqs * -(-longest // cache.block_size)
        room = measure_cache_bytes()
        flag, num_blocks = "The KV pool", min(useful, room // block_bytes - 1)
    if num_blocks < 1:
        raise ConfigError(
            f"{flag}: there is no room for even one KV block of {cache.block_size} tokens, which "
            f"takes {block_bytes} bytes (and a second one for padding). Give the pool more memory "
            "(--kv-cache-memory-bytes, --gpu-memory-utilization) or lower --block-size."
        )
    needed = (num_blocks + 1) * block_bytes
    if needed > free_bytes:
        raise ConfigError(
            f"{flag}: a KV pool of {num_blocks} blocks takes {needed / GIB:.2f} GiB, but only "
            f"{free_bytes / GIB:.2f} GiB are free. Ask for less."
        )
    return num_blocks


def _num_host_blocks(
    cache: CacheConfig, preemption_mode: str, block_bytes: int, host_total_bytes: int
) -> int:
    if preemption_mode == "recompute":
        return 0
    size = int(cache.swap_space * GIB)
    share = f"--swap-space {cache.swap_space:g} is {size / host_total_bytes:.0%} of this machine's"
    memory = f"{host_total_bytes / GIB:.1f} GiB of memory"
    if size > _MOST_OF_HOST * host_total_bytes:
        raise ConfigError(f"{share} {memory}; at most {_MOST_OF_HOST:.0%} can be lent to swapping.")
    if size > _MUCH_OF_HOST * host_total_bytes:
        logger.warning("%s %s", share, memory)
    num_blocks = max(0, size // block_bytes - 1)
    if num_blocks == 0 and preemption_mode == "swap":
        raise ConfigError(
            f"--swap-space {cache.swap_space:g}: --preemption-mode swap needs room for at least "
            f"one KV block ({block_bytes} bytes). Raise it, or use --preemption-mode auto."
        )
    return num_blocks
