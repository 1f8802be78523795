"""The Triton forward kernel, with the algorithm and the features of the CUDA kernels.

Names: `i_` index, `o_` offset, `p_` pointer, `m_` mask, `b_` block. One program computes one block
of query rows of one head. The online softmax is in base 2 (FlashAttention-2, Dao 2023): scale *
log2(e) is one positive factor in the multiply-add of the exponent, unless there are score modifiers
(MODIFIED). Offsets are 64 bits wide.
"""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803, N806

# Triton's own language has no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from flashvar.backends.triton.attention.matrices import (
    clear_rows,
    load_rows,
    store_rows,
    times_transposed,
    zeros,
)
from flashvar.backends.triton.attention.ranges import keys_of_block
from flashvar.backends.triton.attention.scores import (
    LOG2E,
    MIN_RUNNING_MAX,
    kept,
    modified,
    visible,
)
from flashvar.backends.triton.attention.sequences import rows_outside, span, work_tile


@triton.jit
def _update(
    b_acc,  # [BLOCK_Q, HEAD_V] float32, not yet divided by the row sum
    b_acc_tail,  # [BLOCK_Q, TAIL_V]
    b_max,  # [BLOCK_Q] float32: running maximum of scores times log2(e), at least MIN_RUNNING_MAX
    b_sum,  # [BLOCK_Q] float32: running sum of P
    b_q,  # [BLOCK_Q, HEAD]
    b_q_tail,  # [BLOCK_Q, TAIL]
    p_k,  # key 0, dim 0 of the head
    p_v,
    p_bias,
    p_rng,
    k_stride,  # between keys, int64
    v_stride,
    bias_query,
    i_query,
    start,
    stop,
    gap_at,  # with MASKED and LEFT: at this loop index the loop skips `gap` keys
    gap,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    scale_log2,
    softcap_in,
    softcap_out,
    slope,
    head_index,
    dropout_threshold,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Update the state with keys `start` to `stop`; without MASKED every row sees them all."""
    MODIFIED: tl.constexpr = SOFTCAP or ALIBI or (p_bias is not None)
    o_query = i_query + tl.arange(0, BLOCK_Q)[:, None]
    diagonal = seqlen_k - seqlen_q
    for i_position in range(start, stop, BLOCK_KV):
        i_key = i_position
        if MASKED and LEFT:
            i_key += tl.where(i_position >= gap_at, gap, 0)
        left = seqlen_k - i_key
        o_key = i_key + tl.arange(0, BLOCK_KV)[None, :]
        b_k, b_k_tail = load_rows(
            p_k + i_key * k_stride, k_stride, left, BLOCK_KV, HEAD_DIM, HEAD, TAIL, MASKED
        )
        b_s = times_transposed(b_q, b_q_tail, b_k, b_k_tail, TAIL)
        if MODIFIED:
            b_s, _ = modified(
                b_s, o_query, o_key, diagonal, seqlen_q, seqlen_k, scale_log2, softcap_in,
                softcap_out, p_bias, bias_query, slope, SOFTCAP, ALIBI,
            )  # fmt: skip
        if MASKED:
            m_visible = visible(
                o_query, o_key, diagonal, seqlen_k, window_left, window_right, LEFT, RIGHT
            )
            b_s = tl.where(m_visible, b_s, float("-inf"))
        b_row_max = tl.max(b_s, 1)
        if not MODIFIED:
            b_row_max = b_row_max * scale_log2
        b_new_max = tl.maximum(b_max, b_row_max)
        if MODIFIED:
            b_p = tl.exp2(b_s - b_new_max[:, None])
        else:
            b_p = tl.exp2(b_s * scale_log2 - b_new_max[:, None])
        b_rescale = tl.exp2(b_max - b_new_max)
        b_sum = b_sum * b_rescale + tl.sum(b_p, 1)
        b_max = b_new_max
        if p_rng is not None:
            b_p = tl.where(kept(o_query, o_key, p_rng, head_index, dropout_threshold), b_p, 0.0)
        b_p = b_p.to(b_q.dtype)
        b_v, b_v_tail = load_rows(
            p_v + i_key * v_stride, v_stride, left, BLOCK_KV, HEAD_DIM_V, HEAD_V, TAIL_V, MASKED
        )
        b_acc = tl.dot(b_p, b_v, b_acc * b_rescale[:, None])
        if TAIL_V > 0:
            b_acc_tail = tl.dot(b_p, b_v_tail, b_acc_tail * b_rescale[:, None])
    return b_acc, b_acc_tail, b_max, b_sum


@triton.jit
def _clear_outside(
    p_out,
    p_lse,
    p_offsets_q,
    batch,
    total_q,
    i_row,
    out_stride,
    BLOCK_Q: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    HEAD_V: tl.constexpr,
    TAIL_V: tl.constexpr,
):
    """Write out 0 and lse -inf to rows that belong to no sequence."""
    o_rows = tl.arange(0, BLOCK_Q)
    m_outside = rows_outside(p_offsets_q, batch, total_q, i_row + o_rows)
    if tl.max(m_outside.to(tl.int32), 0) > 0:
        clear_rows(
            p_out + i_row * out_stride, out_stride, m_outside,
            BLOCK_Q, HEAD_DIM_V, HEAD_V, TAIL_V,
        )  # fmt: skip
        if p_lse is not None:
            tl.store(p_lse + i_row + o_rows, float("-inf"), mask=m_outside)


@triton.jit
def _store(
    p_out,
    p_lse,
    p_rng,
    p_sink,  # of the head; may be None
    out_stride,
    m_rows,
    b_acc,
    b_acc_tail,
    b_max,
    b_sum,
    dropout_scale,
    BLOCK_Q: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    HEAD_V: tl.constexpr,
    TAIL_V: tl.constexpr,
):
    """Write the output and the log-sum-exp: 0 and -inf, or the sink, in a row that sees no key."""
    b_rescale = 1.0
    if p_sink is not None:
        sink = tl.load(p_sink).to(tl.float32) * LOG2E
        b_max, b_before = tl.maximum(b_max, sink), b_max
        b_rescale = tl.exp2(b_before - b_max)
        b_sum = b_sum * b_rescale + tl.exp2(sink - b_max)
    b_scale = b_rescale / tl.where(b_sum == 0.0, 1.0, b_sum)
    if p_rng is not None:
        b_scale = b_scale * dropout_scale
    store_rows(
        p_out, out_stride, m_rows, b_acc * b_scale[:, None], b_acc_tail * b_scale[:, None],
        BLOCK_Q, HEAD_DIM_V, HEAD_V, TAIL_V,
    )  # fmt: skip
    if p_lse is not None:
        o_rows = tl.arange(0, BLOCK_Q)
        b_lse = tl.where(b_sum == 0.0, float("-inf"), (b_max + tl.log2(b_sum)) / LOG2E)
        tl.store(p_lse + o_rows, b_lse, mask=m_rows)


# Rows are 16-byte aligned. Strides are passed in units of 16 bytes (8 elements), so that the
# compiler knows the alignment for every head dim.
STRIDE_UNIT = tl.constexpr(8)

# Arguments that change from call to call; kernels are not specialised on their values.
RUNTIME = [
    *("batch", "heads_q", "group", "seqlen_q", "seqlen_k", "total_q", "total_k"),
    *("window_left", "window_right", "scale", "scale_log2", "softcap_in", "softcap_out"),
    *("lse_batch", "lse_head", "bias_batch", "bias_head", "bias_query", "slopes_batch"),
    *("dropout_threshold", "dropout_scale"),
    *(
        f"{name}_{axis}"
        for name in ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")
        for axis in ("batch", "row", "head")
    ),
    *("grad_bias_batch", "grad_bias_head", "grad_bias_query", "bias_batches", "bias_heads"),
]


@triton.jit(do_not_specialize=RUNTIME)
def attention_fwd_kernel(
    p_q,  # [batch, seqlen_q, heads_q, HEAD_DIM]; strides in units of STRIDE_UNIT elements
    p_k,  # [batch, seqlen_k, heads_q / group, HEAD_DIM]
    p_v,  # [batch, seqlen_k, heads_q / group, HEAD_DIM_V]
    p_out,  # [batch, seqlen_q, heads_q, HEAD_DIM_V], written
    p_lse,  # [batch, heads_q, seqlen_q] float32, written; may be None
    p_bias,  # [batch, heads_q, seqlen_q, seqlen_k]; strides in elements; may be None
    p_sinks,  # [heads_q]; may be None
    p_slopes,  # [batch, heads_q] float32; may be None
    p_rng,  # int64 [2]; may be None
    p_offsets_q,  # int32 [batch + 1]; None: q is dense
    p_offsets_k,  # int32 [batch + 1]; None: k and v are dense
    p_used_k,  # int32 [batch]; may be None
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row,
    out_head, lse_batch, lse_head, bias_batch, bias_head, bias_query, slopes_batch, batch, heads_q,
    group,  # query heads that share a key head
    seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    scale_log2,  # |scale| * log2(e); with score modifiers scale * log2(e)
    softcap_in, softcap_out, dropout_threshold, dropout_scale,
    SIGN: tl.constexpr,  # of the scale: 1, -1 or 0
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,  # the window is bounded on the left
    RIGHT: tl.constexpr,  # the window is bounded on the right, also by a causal mask
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    HEAD_V: tl.constexpr, TAIL_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Compute one block of query rows; the grid is one-dimensional, in the order of `work_tile`.

    Over 100 lines, of which the parameters are 26.
    """
    i_batch, i_head, i_block, i_tile = work_tile(
        p_offsets_q, batch, heads_q, seqlen_q, total_q, False, BLOCK_Q
    )
    o_rows = tl.arange(0, BLOCK_Q)
    out_stride = out_row.to(tl.int64) * STRIDE_UNIT
    p_out += i_head.to(tl.int64) * out_head * STRIDE_UNIT
    if p_lse is not None:
        p_lse += i_head.to(tl.int64) * lse_head
    if p_offsets_q is not None:
        _clear_outside(
            p_out, p_lse, p_offsets_q, batch, total_q, i_tile * BLOCK_Q, out_stride,
            BLOCK_Q, HEAD_DIM_V, HEAD_V, TAIL_V,
        )  # fmt: skip
    first_q, seqlen_q, _ = span(p_offsets_q, None, i_batch, seqlen_q, total_q)
    first_k, _, seqlen_k = span(p_offsets_k, p_used_k, i_batch, seqlen_k, total_k)
    blocks = tl.cdiv(seqlen_q, BLOCK_Q)
    if p_offsets_q is not None:  # noqa: SIM102 - the outer one is for the compiler
        if i_block >= blocks:
            return
    if RIGHT:
        i_block = blocks - 1 - i_block  # longest blocks first, so that programs end together
    i_query = i_block * BLOCK_Q
    head_index = i_batch * heads_q + i_head
    i_batch = i_batch.to(tl.int64)
    i_head = i_head.to(tl.int64)
    i_head_kv = i_head // group

    q_stride = q_row.to(tl.int64) * STRIDE_UNIT
    k_stride = k_row.to(tl.int64) * STRIDE_UNIT
    v_stride = v_row.to(tl.int64) * STRIDE_UNIT
    p_q += (i_batch * q_batch + i_head * q_head) * STRIDE_UNIT + (first_q + i_query) * q_stride
    p_k += (i_batch * k_batch + i_head_kv * k_head) * STRIDE_UNIT + first_k * k_stride
    p_v += (i_batch * v_batch + i_head_kv * v_head) * STRIDE_UNIT + first_k * v_stride
    p_out += i_batch * out_batch * STRIDE_UNIT + (first_q + i_query) * out_stride
    bias_query = bias_query.to(tl.int64)
    if p_bias is not None:
        p_bias += i_batch * bias_batch + i_head * bias_head
    slope = 0.0
    if p_slopes is not None:
        slope = tl.load(p_slopes + i_batch * slopes_batch + i_head) * LOG2E

    left = seqlen_q - i_query
    b_q, b_q_tail = load_rows(p_q, q_stride, left, BLOCK_Q, HEAD_DIM, HEAD, TAIL, True)
    if SIGN != 1:
        b_q = (b_q * SIGN).to(p_q.dtype.element_ty)
        b_q_tail = (b_q_tail * SIGN).to(p_q.dtype.element_ty)
    b_acc, b_acc_tail = zeros(BLOCK_Q, HEAD_V, TAIL_V)
    # Not -inf: differences from it are finite.
    b_max = tl.full([BLOCK_Q], MIN_RUNNING_MAX, tl.float32)
    b_sum = tl.zeros([BLOCK_Q], tl.float32)

    start, stop, unmasked, masked, gap = keys_of_block(
        i_query, seqlen_q, seqlen_k, window_left, window_right, LEFT, RIGHT, BLOCK_Q, BLOCK_KV
    )
    b_acc, b_acc_tail, b_max, b_sum = _update(
        b_acc, b_acc_tail, b_max, b_sum, b_q, b_q_tail, p_k, p_v, p_bias, p_rng,
        k_stride, v_stride, bias_query, i_query, unmasked, masked, 0, 0, seqlen_q, seqlen_k,
        window_left, window_right, scale_log2, softcap_in, softcap_out, slope, head_index,
        dropout_threshold, SOFTCAP, p_slopes is not None, LEFT, RIGHT, HEAD_DIM, HEAD_DIM_V,
        HEAD, TAIL, HEAD_V, TAIL_V, BLOCK_Q, BLOCK_KV, False,
    )  # fmt: skip
    b_acc, b_acc_tail, b_max, b_sum = _update(
        b_acc, b_acc_tail, b_max, b_sum, b_q, b_q_tail, p_k, p_v, p_bias, p_rng,
        k_stride, v_stride, bias_query, i_query, start, stop - gap, unmasked, gap,
        seqlen_q, seqlen_k, window_left, window_right, scale_log2, softcap_in, softcap_out, slope,
        head_index, dropout_threshold, SOFTCAP, p_slopes is not None, LEFT, RIGHT, HEAD_DIM,
        HEAD_DIM_V, HEAD, TAIL, HEAD_V, TAIL_V, BLOCK_Q, BLOCK_KV, True,
    )  # fmt: skip

    if p_lse is not None:
        p_lse += i_batch * lse_batch + first_q + i_query
    if p_sinks is not None:
        p_sinks += i_head
    _store(
        p_out, p_lse, p_rng, p_sinks, out_stride, o_rows < left, b_acc, b_acc_tail, b_max, b_sum,
        dropout_scale, BLOCK_Q, HEAD_DIM_V, HEAD_V, TAIL_V,
    )  # fmt: skip
