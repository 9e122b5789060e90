"""The draw of a token within top_k, top_p and min_p, without sorting the vocabulary.

Three launches. Two pass over the logits, each row in pieces side by side: the first finds the best
token of every tile of 1024, the second the mass and the draw of each piece, and it lists the few
tokens that top_k or top_p may have to tell apart. The third has one program a row, which decides on
the list in registers.

The list holds every token from a threshold up, so what is counted on it is exact: at least the
top_k best tiles' best tokens are as good as the top_k-th best tile's, which is the threshold; under
top_p alone it is e^-8 of the most likely token. A row whose list is not enough (more tokens of a
piece than its part holds, as when all are equally likely) is decided by passes over its logits.

Shapes   logits [S, V]; controls [S, >= 4]: temperature, top_k, top_p, min_p; keys [S, 2] int32, one
         pair per (seed, position) → token ids [S] int64. With T tiles and P pieces a row: tiles
         [S, 2, T], pieces [S, 4, P], list [S, 2, P, L], all of 32 bits.
Dtypes   fp32.
Grid     [S, P], [S, P], [S].
Bytes    the logits twice; lists and totals are some 2 % of that. FLOPs: about 30 per logit.
Source   Gumbel-max draw with counter-based noise, as in worker/sampling/noise.py, so a seed gives
         its token in any batch; rejection in place of sorting: FlashInfer's sampling (2025), where
         each rejected candidate becomes the pivot; top_k by radix select (Alabi et al., 2012).
"""

from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.draw_parts import (
    INFINITE,
    MAGNITUDE,
    best_of,
    gumbel,
    kth_listed_rank,
    kth_rank,
    rank_of,
    scaled_logit,
    scan_below,
    scan_list,
)

BANNED = tl.constexpr(-3.4028234663852886e38)
FARTHEST = tl.constexpr(-8.0)
"""Scaled logit down to which tokens are listed where top_k does not say."""
MASS, VALUE, TOKEN, LISTED = (tl.constexpr(row) for row in range(4))
"""Rows of a piece's results; the last two are integers."""


@triton.jit
def tile_maxima_kernel(
    tiles_ptr,
    logits_ptr,
    logits_stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # of a piece
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    tokens = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    row_ptr = logits_ptr + row * logits_stride
    logit = tl.load(row_ptr + tokens, mask=tokens < VOCAB, other=float("-inf"))
    highest = tl.max(logit, 1)
    token = tl.min(tl.where(logit == highest[:, None], tokens, MAGNITUDE), 1)
    out_ptr = tiles_ptr + row * (2 * tl.num_programs(1) * TILES)
    tl.store(out_ptr + tile, highest)
    tl.store(out_ptr + tl.num_programs(1) * TILES + tile, token.to(tl.float32, bitcast=True))


@triton.jit
def row_best(tiles_ptr, row, ALL_TILES: tl.constexpr, PADDED_TILES: tl.constexpr):
    """(every tile's maximum, -inf past the last; the row's; and its first token)."""
    tile = tl.arange(0, PADDED_TILES)
    row_ptr = tiles_ptr + row * (2 * ALL_TILES)
    mask = tile < ALL_TILES
    maxima = tl.load(row_ptr + tile, mask=mask, other=float("-inf"))
    first = tl.load(row_ptr + ALL_TILES + tile, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    highest = tl.max(maxima, 0)
    return maxima, highest, tl.min(tl.where(maxima == highest, first, MAGNITUDE), 0)


@triton.jit
def scan_pieces_kernel(
    out_ptr,
    pieces_ptr,
    list_ptr,
    tiles_ptr,
    logits_ptr,
    controls_ptr,
    keys_ptr,
    logits_stride,
    controls_stride,
    VOCAB: tl.constexpr,
    PIECE: tl.constexpr,
    LIST: tl.constexpr,  # room in a piece's list
    ALL_TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    temperature, top_k, top_p, floor, first_key, second_key = row_wishes(
        controls_ptr + row * controls_stride, keys_ptr + row * 2
    )
    maxima, highest, token = row_best(tiles_ptr, row, ALL_TILES, PADDED_TILES)
    if temperature == 0.0:
        if piece == 0:
            tl.store(out_ptr + row, token.to(tl.int64))
        return
    # Relative to the row's maximum nothing overflows, however small the temperature.
    highest = tl.maximum(highest, BANNED)

    tokens = piece * PIECE + tl.arange(0, PIECE)
    logit = tl.load(
        logits_ptr + row * logits_stride + tokens, mask=tokens < VOCAB, other=float("-inf")
    )
    scaled = scaled_logit(logit, highest, temperature, floor)
    value, token = best_of(scaled + gumbel(tokens, first_key, second_key), tokens)
    mass = tl.sum(tl.exp(scaled), 0)
    listed = tl.zeros([], tl.int32)
    if (top_k < VOCAB) | (top_p < 1.0):
        threshold = list_threshold(
            tiles_ptr + row * (2 * ALL_TILES), maxima, highest, temperature, top_k, VOCAB, ALL_TILES
        )
        kept = (scaled >= threshold) & (scaled > float("-inf"))
        place = tl.cumsum(kept.to(tl.int32), 0) - 1
        listed = tl.sum(kept.to(tl.int32), 0)
        # A row's values come first, then its tokens; each piece has its own part of both.
        part_ptr = list_ptr + (row * 2 * tl.num_programs(1) + piece) * LIST + place
        tl.store(part_ptr, scaled, mask=kept & (place < LIST))
        tl.store(
            part_ptr + tl.num_programs(1) * LIST,
            tokens.to(tl.float32, bitcast=True),
            mask=kept & (place < LIST),
        )
    piece_ptr = pieces_ptr + row * 4 * tl.num_programs(1) + piece
    tl.store(piece_ptr + MASS * tl.num_programs(1), mass)
    tl.store(piece_ptr + VALUE * tl.num_programs(1), value)
    tl.store(piece_ptr + TOKEN * tl.num_programs(1), token.to(tl.float32, bitcast=True))
    tl.store(piece_ptr + LISTED * tl.num_programs(1), listed.to(tl.float32, bitcast=True))


@triton.jit
def choose_kernel(
    out_ptr,
    pieces_ptr,
    list_ptr,
    tiles_ptr,
    logits_ptr,
    controls_ptr,
    keys_ptr,
    logits_stride,
    controls_stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    PIECES: tl.constexpr,
    PADDED_PIECES: tl.constexpr,
    ALL_TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    temperature, top_k, top_p, floor, first_key, second_key = row_wishes(
        controls_ptr + row * controls_stride, keys_ptr + row * 2
    )
    if temperature == 0.0:
        return
    piece = tl.arange(0, PADDED_PIECES)
    inside = piece < PIECES
    piece_ptr = pieces_ptr + row * 4 * PIECES + piece
    mass = tl.sum(tl.load(piece_ptr + MASS * PIECES, mask=inside, other=0.0), 0)
    values = tl.load(piece_ptr + VALUE * PIECES, mask=inside, other=float("-inf"))
    tokens = tl.load(piece_ptr + TOKEN * PIECES, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    _, token = best_of(values, tokens)
    if (top_k >= VOCAB) & (top_p >= 1.0):
        tl.store(out_ptr + row, token.to(tl.int64))
        return
    maxima, highest, _ = row_best(tiles_ptr, row, ALL_TILES, PADDED_TILES)
    highest = tl.maximum(highest, BANNED)
    threshold = list_threshold(
        tiles_ptr + row * (2 * ALL_TILES), maxima, highest, temperature, top_k, VOCAB, ALL_TILES
    )

    counts = tl.load(piece_ptr + LISTED * PIECES, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    num_listed = tl.sum(counts, 0)
    place = tl.arange(0, LIST)[None, :]
    held = (place < counts[:, None]) & inside[:, None]
    list_ptrs = list_ptr + row * (2 * PIECES * LIST) + piece[:, None] * LIST + place
    scaled = tl.load(list_ptrs, mask=held, other=float("-inf"))
    scaled = tl.reshape(scaled, [PADDED_PIECES * LIST])
    listed = tl.load(list_ptrs + PIECES * LIST, mask=held, other=0.0).to(tl.int32, bitcast=True)
    listed = tl.reshape(listed, [PADDED_PIECES * LIST])
    # Up to which rank the list has every token.
    listed_rank = rank_of(threshold)
    by_tiles = (top_k < VOCAB) & (top_k <= ALL_TILES)
    if (threshold == float("-inf")) | (by_tiles & (num_listed < top_k)):
        listed_rank = INFINITE + 0  # all others are out of the question
    if tl.max(counts, 0) > LIST:
        listed_rank = -1

    last_rank = tl.full([], INFINITE, tl.int32)
    if top_k < VOCAB:
        if (listed_rank >= 0) & (num_listed >= top_k):
            last_rank = kth_listed_rank(scaled, top_k)
        elif listed_rank < INFINITE:
            last_rank = kth_rank(row_ptr, highest, temperature, floor, top_k, VOCAB, TILE)
    # A first draw within top_k, or else the whole row's; then, as long as what is likelier than the
    # token has the mass, another one from there.
    drawn = top_k >= VOCAB
    goal = mass * top_p
    accepted = False
    while accepted == 0:
        rank = last_rank + 1
        if drawn:
            logit = tl.load(row_ptr + token)
            rank = rank_of(scaled_logit(logit, highest, temperature, floor))
        if rank <= listed_rank + 1:
            mass, next_token = scan_list(scaled, listed, rank, first_key, second_key)
        else:
            mass, next_token = scan_below(
                row_ptr, highest, temperature, floor, rank, first_key, second_key, VOCAB, TILE
            )
        accepted = drawn & ((mass < goal) | (mass == 0.0))
        token = tl.where(accepted, token, next_token)
        goal = tl.where(drawn, goal, mass * top_p)
        accepted = accepted | (top_p >= 1.0)
        drawn = True
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def row_wishes(controls_ptr, keys_ptr):
    """(temperature, top_k, top_p, lowest scaled logit under min_p, two keys of the noise)."""
    floor = tl.log(tl.load(controls_ptr + 3))  # relative to the best token
    first_key = tl.load(keys_ptr).to(tl.uint32, bitcast=True)
    second_key = tl.load(keys_ptr + 1).to(tl.uint32, bitcast=True) | 1
    return (
        tl.load(controls_ptr),
        tl.load(controls_ptr + 1),
        tl.load(controls_ptr + 2),
        floor,
        first_key,
        second_key,
    )


@triton.jit
def list_threshold(
    row_tiles_ptr,
    maxima,
    highest,
    temperature,
    top_k,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
):
    """The scaled logit from which on tokens are listed: of the top_k-th best tile, if there are as
    many; -inf if so many have no token at all."""
    threshold = FARTHEST + 0.0
    if (top_k < VOCAB) & (top_k <= TILES):
        as_good = tl.zeros_like(maxima).to(tl.int32)
        for start in tl.range(0, TILES, 16):
            tile = start + tl.arange(0, 16)
            others = tl.load(row_tiles_ptr + tile, mask=tile < TILES, other=float("-inf"))
            as_good += tl.sum((others[None, :] >= maxima[:, None]).to(tl.int32), 1)
        kth = tl.max(tl.where(as_good >= top_k, maxima, float("-inf")), 0)
        threshold = scaled_logit(kth, highest, temperature, float("-inf"))
    return threshold
