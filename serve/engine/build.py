"""Config → a live engine core, in order; the one place that wires its classes together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from serve.config import CacheConfig, EngineConfig
from serve.engine.core import EngineCore, Inbox, Outbox
from serve.engine.grammar.grammars import Grammars
from serve.engine.grammar.vocabulary import Vocabulary, model_vocabulary, no_vocabulary
from serve.engine.inspect.trace import TraceFile
from serve.engine.prefix_file import PrefixFile
from serve.errors import ConfigError
from serve.kv_cache.block_table import num_blocks_for
from serve.kv_cache.manager import KVCacheManager
from serve.messages import EngineReady
from serve.scheduler.limits import SchedulerLimits
from serve.scheduler.scheduler import Scheduler
from serve.worker.executor import BlockArchive, Executor, WorkerInfo

logger = logging.getLogger(__name__)


def import_worker() -> None:
    """Import what `build_engine_core` needs: torch takes seconds, and nobody need wait to be told
    the model for that. At a first start kernels are compiled from here on."""
    import serve.worker.local_executor  # noqa: F401
    from serve.worker.startup.ahead import begin_ahead

    begin_ahead()


def build_engine_core(
    config: EngineConfig, model_path: Path, inbox: Inbox, outbox: Outbox
) -> tuple[EngineCore, EngineReady]:
    """Load the model and make a core around it. Raises ConfigError."""
    # torch takes seconds to import: cores over other executors do without
    from serve.worker.local_executor import LocalExecutor

    executor = LocalExecutor(config, model_path)
    vocabulary = partial(model_vocabulary, model_path, config.model.load_format)
    return core_over(executor, config, inbox, outbox, archive=executor, vocabulary_of=vocabulary)


def core_over(
    executor: Executor,
    config: EngineConfig,
    inbox: Inbox,
    outbox: Outbox,
    clock: Callable[[], float] = time.monotonic,
    archive: BlockArchive | None = None,
    vocabulary_of: Callable[[int], Vocabulary] | None = None,
) -> tuple[EngineCore, EngineReady]:
    """Start `executor` and make a core that drives it; what it measured sizes everything.

    `archive` keeps blocks for --prefix-cache-file; without one, the flag does nothing.
    `vocabulary_of`: by how many tokens the model scores; without it there are no grammars.
    """
    worker = executor.start()
    scheduling = config.scheduler
    speculation = scheduling.speculation()
    try:
        limits = SchedulerLimits.of(
            scheduling,
            max_num_batched_tokens=worker.max_num_batched_tokens,
            max_model_len=worker.max_model_len,
        )
    except ValueError as error:
        executor.close()
        raise ConfigError(f"{error}; raise --max-num-batched-tokens.") from error
    kv = KVCacheManager(
        worker.num_blocks,
        config.cache.block_size,
        worker.num_host_blocks,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        max_pinned_blocks=_max_pinned_blocks(config.cache, worker),
        prompt_limits=worker.prompt_limits,
    )
    ready = EngineReady(
        max_model_len=worker.max_model_len,
        num_blocks=worker.num_blocks,
        block_size=config.cache.block_size,
        num_host_blocks=worker.num_host_blocks,
        vocab_size=worker.vocab_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        device=worker.device,
        dtype=worker.dtype,
        attention_backend=worker.attention_backend,
        prefix_caching=config.cache.enable_prefix_caching,
        scheduling_policy=limits.policy,
        block_bytes=worker.block_bytes,
        cache_dtype=worker.cache_dtype,
        identity=worker.identity,
        num_drafts=0 if speculation is None else speculation.num_speculative_tokens,
    )
    depth = {"auto": worker.depth, "on": 2, "off": 1}[scheduling.async_scheduling]
    if speculation is not None:
        depth = 1  # drafts continue known tokens
        logger.info(
            "speculation: %s, up to %d drafts of a request in a step, one step at a time",
            speculation.method,
            speculation.num_speculative_tokens,
        )
    scheduler = Scheduler(kv, limits, clock, speculation)
    path = scheduling.trace_file
    trace = None if path is None else TraceFile(Path(path).expanduser(), scheduler.view())
    prefix_file = _prefix_file(config.cache, kv, archive)
    vocabulary = no_vocabulary if vocabulary_of is None else vocabulary_of(worker.vocab_size)
    grammars = Grammars(vocabulary, worker.vocab_size)
    core = EngineCore(scheduler, executor, inbox, outbox, depth, trace, prefix_file, grammars)
    return core, ready


def _prefix_file(
    cache: CacheConfig, kv: KVCacheManager, archive: BlockArchive | None
) -> PrefixFile | None:
    """The prefix cache's file, which has been read."""
    if cache.prefix_cache_file is None or archive is None:
        return None
    file = PrefixFile(Path(cache.prefix_cache_file).expanduser(), kv, archive)
    file.load()
    return file


def _max_pinned_blocks(cache: CacheConfig, worker: WorkerInfo) -> int:
    """So many that the longest request finds room beside them, and nothing waits for ever."""
    longest = num_blocks_for(worker.max_model_len, cache.block_size)
    most = int(cache.max_pinned_share * worker.num_blocks)
    return max(0, min(most, worker.num_blocks - longest))
